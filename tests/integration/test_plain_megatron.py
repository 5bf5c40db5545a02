"""With unicrond on and no fault, training is Megatron's: against its own DistributedDataParallel, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import SMALL, begin, complete
from unicrond.events.vocabulary import CheckpointSpec, OptimizerSpec, TaskSpec

HERE = Path(__file__).parent


@dataclass
class Course:
    """A run, iteration by iteration: digests of the parameters, and losses."""

    digests: list[str]
    losses: list[float]


def ours(server: ForkServer, directory: Path, spec: TaskSpec, replicas: int, *variant: str) -> Course:
    directory.mkdir()
    spec = replace(spec, entry=str(HERE / "traced_gpt.py"), args=(str(directory), *variant))
    with Rig(server, directory, spec) as rig:
        begin(rig, *(f"t.{number}" for number in range(1, replicas + 1)))
        complete(rig)
    lines = stepped(directory / "t.1.trace")
    return Course([line[2] for line in lines], [float(line[3]) for line in lines])


def plain(server: ForkServer, directory: Path, spec: TaskSpec, replicas: int, *variant: str) -> Course:
    directory.mkdir()
    spec = replace(spec, tp=replicas, entry=str(HERE / "plain_gpt.py"), args=(str(directory), *variant))
    workers = [f"t.{number}" for number in range(1, replicas + 1)]
    with Rig(server, directory, spec) as rig:
        rig.start(*workers)
        rig.until(lambda: len(rig.exits) == replicas)
        assert set(rig.exits.values()) == {0}
    ranks = [stepped(directory / f"{worker}.trace") for worker in workers]
    losses = [
        sum(float(line[3]) for line in lines) / sum(int(line[4]) for line in lines)
        for lines in zip(*ranks, strict=True)
    ]
    return Course([line[2] for line in ranks[0]], losses)


def stepped(trace: Path) -> list[list[str]]:
    return [words for line in trace.read_text().splitlines() if (words := line.split())[0] == "stepped"]


def task(data: Path) -> TaskSpec:
    """Clipping takes hold (gradient norms are above 1), the rate warms up and decays, 128 tokens an iteration."""
    return TaskSpec(
        name="p",
        model=replace(SMALL, layers=2, dropout=0.1),
        optimizer=OptimizerSpec(lr=3e-3, min_lr=1e-4, warmup_iterations=3, weight_decay=0.1, clip_grad=0.5),
        data=str(data),
        global_batch=8,
        iterations=8,
        env={"UNICRON_BUCKET_BYTES": "65536"},
        checkpoint=CheckpointSpec(dir="(the rig says)", interval=0),
    )


@pytest.mark.parametrize(
    ("replicas", "variant"),
    [(1, ()), (2, ()), (2, ("--recompute",)), (2, ("--bf16",)), (2, ("--lanes",))],
    ids=["one", "two", "recompute", "bf16", "lanes"],
)
def test_training_matches_megatron_bit_for_bit(
    server: ForkServer, data: Path, tmp_path: Path, replicas: int, variant: tuple[str, ...]
) -> None:
    """`--lanes`: each of plain Megatron's ranks takes a lane."""
    spec = task(data)
    if "--lanes" in variant:
        spec = replace(spec, accumulation="exact", max_workers=replicas)
    expected = plain(server, tmp_path / "plain", spec, replicas, "--bucket", "16384", *variant)
    found = ours(server, tmp_path / "ours", spec, replicas, *variant)
    assert len(set(expected.digests)) == spec.iterations
    assert found.digests == expected.digests
    assert found.losses == pytest.approx(expected.losses, rel=1e-7)


def test_three_replicas_match_megatron_to_one_in_a_million(server: ForkServer, data: Path, tmp_path: Path) -> None:
    """Three sums in another order, a count that is no power of two: no equal bits, and no more than rounding apart."""
    spec = replace(task(data), global_batch=12)
    expected = plain(server, tmp_path / "plain", spec, 3)
    found = ours(server, tmp_path / "ours", spec, 3)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    fixed = ours(server, tmp_path / "fixed", replace(spec, accumulation="exact", max_workers=6), 3)
    assert fixed.losses == pytest.approx(expected.losses, rel=1e-6)
