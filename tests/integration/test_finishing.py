"""What several shards of a replica hold stays the same on all of them (`gradients/finishing.py`)."""

from __future__ import annotations

from pathlib import Path

import torch
from msgspec.structs import replace

from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import begin, complete
from unicrond.events.vocabulary import CheckpointSpec, ModelSpec, TaskSpec

PROGRAM = Path(__file__).with_name("shared_gpt.py")


def task(data: Path, tmp_path: Path, **layout: int) -> TaskSpec:
    return TaskSpec(
        name="t",
        entry=str(PROGRAM),
        args=(str(tmp_path),),
        model=ModelSpec(layers=2, hidden=32, heads=2, seq=16, vocab=256),
        data=str(data),
        global_batch=4,
        iterations=6,
        checkpoint=CheckpointSpec(dir="(the rig says)", interval=0),
        **layout,  # type: ignore[arg-type]
    )


def of_two_shards(server: ForkServer, tmp_path: Path, spec: TaskSpec, shared: str) -> torch.Tensor:
    """The parameter that both hold, at the end; it must be the same."""
    with Rig(server, tmp_path, spec) as rig:
        begin(rig, "t.1", "t.2")
        complete(rig)
    one, other = (torch.load(tmp_path / f"t.{number}.shared") for number in (1, 2))
    (name,) = [name for name in one if name.endswith(shared)]
    assert torch.equal(one[name], other[name])
    return one[name]


def test_tensor_parallel_norms_stay_equal(server: ForkServer, data: Path, tmp_path: Path) -> None:
    """They are also those of one process, to rounding."""
    shared = "layers.0.self_attention.q_layernorm.weight"
    spec = task(data, tmp_path, tp=2, min_workers=2, max_workers=2)
    found = of_two_shards(server, tmp_path, spec, shared)
    with Rig(server, tmp_path, replace(spec, tp=1, min_workers=1, max_workers=1)) as rig:
        begin(rig, "t.3")
        complete(rig)
    alone = torch.load(tmp_path / "t.3.shared")
    (name,) = [name for name in alone if name.endswith(shared)]
    assert float((found - alone[name]).abs().max()) <= 1e-4  # Adam's; 0.02 where copies part


def test_tied_embedding_stays_equal_over_stages(server: ForkServer, data: Path, tmp_path: Path) -> None:
    """(Megatron seeds each stage's layers on its own, so one process begins with others.)"""
    of_two_shards(server, tmp_path, task(data, tmp_path, pp=2, min_workers=2, max_workers=2), "tied")
