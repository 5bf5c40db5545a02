"""Another layout for Megatron-LM in the middle of its training: the state is put together anew, and training goes on
as in a run that kept its layout. `make megatron-lm`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_reshape import BOUNDARY, apart, go_on, hand_over
from tests.megatron_lm.fixtures import MODEL, task
from tests.megatron_lm.runs import names, told, unbroken
from tests.megatron_lm.test_layouts import MOE
from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.resharding import layout_in
from unicrond.events.vocabulary import CheckpointSpec, StateLoaded, TaskSpec
from unicrond.events.vocabulary.shape import Shape

pytestmark = [pytest.mark.timeout(600), pytest.mark.megatron_lm]
EIGHT = MODEL.replace("--train-iters 5", "--train-iters 8")
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
#: Its vocabulary is padded to 256 for tp 2, and would be to 128 for tp 1.
ODD = "--vocab-size 100"
GATED = "--swiglu --group-query-attention --num-query-groups 2 --disable-bias-linear --normalization RMSNorm"
INTERLEAVED = f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --num-layers 4"
EP2 = f"{TP2} --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
WAYS = {
    "tp 2 -> tp 1, odd vocabulary": (f"{TP2} {ODD}", Shape(1, 1)),
    "tp 1 -> tp 2, sequence parallel, gated": (f"--sequence-parallel {GATED}", Shape(2, 1)),
    "tp 2 -> pp 2, gated": (f"{TP2} {GATED}", Shape(1, 2)),
    "pp 2 -> tp 2, untied, distributed": (
        f"{PP2} --untie-embeddings-and-output-weights --use-distributed-optimizer",
        Shape(2, 1),
    ),
    "interleaved: tp 1 -> tp 2": (INTERLEAVED, Shape(2, 2, vpp=2)),
    "interleaved: vpp 2 -> 1": (INTERLEAVED, Shape(1, 2)),
    "interleaved: pp 2, vpp 2 -> pp 1": (INTERLEAVED, Shape(1, 1)),
    "pp 1 -> interleaved: pp 2, vpp 2": ("--num-layers 4", Shape(1, 2, vpp=2)),
    "experts: pp 2 -> pp 1": (f"{PP2} {MOE}", Shape(1, 1)),
    "experts: pp 1 -> interleaved: pp 2, vpp 2": (f"{MOE} --num-layers 4", Shape(1, 2, vpp=2)),
    "experts: ep 2 -> 1": (f"{MOE} {EP2}", Shape(2, 1)),
    "experts: tp 1 -> tp 2, ep 2": (f"{MOE} --sequence-parallel", Shape(2, 1, ep=2)),
}


def of_memory(spec: TaskSpec) -> TaskSpec:
    """Memory is written to at the handover alone."""
    return msgspec.structs.replace(spec, checkpoint=CheckpointSpec(interval=0, memory_interval=1000))


def whole(directory: Path) -> dict[str, torch.Tensor]:
    """The last parameters that the rig's task of this directory has saved, by their global names, in any layout."""
    name = directory.name
    iteration, layout = next(iter(checkpoint.newest_iterations(directory, name).items()))
    shards = [checkpoint.load(directory, name, iteration, shard)[0] for shard in range(layout.workers)]
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        for local, pieces in layout_in(shard).tensors.items():
            for piece in pieces:
                kept = shard["tensors"][local]
                target = tensors.setdefault(piece.key, torch.empty(piece.whole, dtype=kept.dtype))
                place = target[tuple(slice(begin, end) for begin, end in piece.box)]
                place.copy_(piece.view(kept, piece.box).reshape(place.shape))
    return tensors


@pytest.mark.parametrize("way", WAYS)
def test_training_continues_in_other_layout(server: ForkServer, tmp_path: Path, way: str) -> None:
    flags, shape = WAYS[way]
    spec = of_memory(task(flags, model=EIGHT))
    goes_on(server, tmp_path, way, spec, spec, shape)


def test_task_with_megatron_checkpoint_continues_in_other_layout(server: ForkServer, tmp_path: Path) -> None:
    """The new workers find one that the old ones have saved, of an older iteration, and read it in their layout."""

    def saving(directory: str) -> TaskSpec:
        saved = tmp_path / directory
        return of_memory(
            task(f"{TP2} --save {saved} --load {saved} --save-interval 2 --ckpt-format torch_dist", model=EIGHT)
        )

    logs = goes_on(server, tmp_path, "Megatron's own", saving("one"), saving("other"), Shape(1, 1))
    assert "successfully loaded checkpoint" in logs["t.3"] and "at iteration 2" in logs["t.3"]
    assert (tmp_path / "other" / "latest_checkpointed_iteration.txt").read_text() == "8"


def goes_on(
    server: ForkServer, tmp_path: Path, way: str, unchanged: TaskSpec, spec: TaskSpec, shape: Shape
) -> dict[str, str]:
    """Trained on in that layout as in an unchanged run; the workers' logs."""
    kept = unbroken(server, tmp_path / "kept", unchanged, 1)
    with Rig(server, tmp_path, spec) as rig:
        old = names(spec, range(1))
        hand_over(rig, old, memory=True)
        degrees = {name: size for name, size in shape._asdict().items() if name != "micro_batch"}
        other = msgspec.structs.replace(spec, **degrees)
        go_on(rig, other, [f"t.{len(old) + 1 + number}" for number in range(shape.workers)])
        (taken,) = rig.of(StateLoaded, f"t.{len(old) + 1}")
        assert isinstance(taken, StateLoaded) and (taken.source, taken.iteration) == ("peer", BOUNDARY)
        assert taken.resharded_from == str(spec.cut)
        losses = {iteration: commit.loss for iteration, commit in rig.iterations().items()}
        here = whole(rig.checkpoints)
    (kept_in,) = (one for one in (tmp_path / "kept").glob("t-*") if one.is_dir())
    there = whole(kept_in)
    assert list(losses) == list(kept.iterations)
    assert list(losses.values()) == pytest.approx(kept.losses, rel=1e-6)
    distance = apart(here, there)
    told(f"{way}: parameters {distance:.2g} apart")
    assert distance <= 1e-6
    return {log.stem: log.read_text() for log in tmp_path.glob("*.log")}
