"""Replicas that torch's `fully_shard` shards over their workers: as one process with the whole model, whoever dies."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.integration import sharded_loop
from tests.integration.kill_chain import ACTIONS, POINTS, STEPS_AFTER, VICTIMS, Cell, Run
from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_adapters import losses as printed_losses
from tests.integration.test_adapters import run_ranks
from tests.integration.test_kill_matrix import chains
from tests.integration.test_regroup import begin, complete, lose, regrouped
from unicrond.agents.protocol.sampling import Sampling, samples_digest
from unicrond.events.vocabulary import CheckpointSpec, ErrorReported, TaskSpec
from unicrond.local.dev import free_port

SCRIPT = Path(sharded_loop.__file__)
RANKS, FOUR = 2, ("t.1", "t.2", "t.3", "t.4")


def task(case: str = "", **changes: object) -> TaskSpec:
    """Six micro-batches, of two samples on each of two workers."""
    fields: dict[str, object] = {
        "name": "f",
        "entry": str(SCRIPT),
        "args": (case,),
        "ep": RANKS,
        "max_workers": 6 * RANKS,
        "global_batch": 24,
        "micro_batch": 2,
        "iterations": 12,
        "accumulation": "exact",
        "env": {"UNICRON_BUCKET_BYTES": "512", "UNICRON_DETERMINISTIC": "off", "UNICRON_LANES": "3"},
        "checkpoint": CheckpointSpec(interval=0, memory_interval=0),
        **changes,
    }
    return TaskSpec(**fields)  # type: ignore[arg-type]


def check_samples(rig: Rig) -> None:
    spec = rig.spec
    sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, sharded_loop.SAMPLES)
    for iteration, commit in rig.iterations().items():
        numbers = range(spec.global_batch // spec.micro_batch)
        samples = [sample for number in numbers for sample in sampling.samples(iteration, number)]
        assert commit.samples == spec.global_batch
        assert commit.samples_digest == samples_digest(iteration, samples)


def losses(trace: Path) -> dict[int, float]:
    found = (line.split() for line in trace.read_text().splitlines())
    return {int(words[1]): float(words[3]) for words in found if words[0] == "stepped"}


def alone(directory: Path, case: str, spec: TaskSpec) -> dict[int, float]:
    """The losses of the whole model in one process."""
    directory.mkdir()
    sharded_loop.main(str(directory), case, spec.iterations, spec.global_batch, spec.micro_batch)
    return losses(directory / "local.trace")


def unbroken(server: ForkServer, directory: Path, spec: TaskSpec) -> Run:
    """One replica that nothing happens to."""
    directory.mkdir()
    run = Run(server, directory, spec, (), script=SCRIPT)
    with run.rig as rig:
        begin(rig, *run.workers(0))
        complete(rig)
    run.chain.born = 1
    return run


@pytest.mark.parametrize("case", ["", "momentum", "dataloader"])
def test_losses_are_those_of_one_process_through_a_death(server: ForkServer, tmp_path: Path, case: str) -> None:
    env = {**task().env, "UNICRON_DETERMINISTIC": "require", "UNICRON_AUDIT_BUDGET": "0.1"}
    run = Run(server, tmp_path, task(case, env=env), (), script=SCRIPT)
    with run.rig as rig:
        begin(rig, *FOUR, fault={"t.4": "kill@iteration=3,at=backward"})
        lose(rig, "t.4")
        rig.signal("t.3", signal.SIGKILL)
        rig.until(lambda: "t.3" in rig.exits)
        rig.start("t.5", "t.6")
        rig.until(lambda: rig.ready("t.5", "t.6"))
        rig.tell(2, ["t.1", "t.2", "t.5", "t.6"], joiners=["t.5", "t.6"], urgent=True)
        complete(rig)
        assert {regrouped(rig, worker).source for worker in ("t.5", "t.6")} == {"replica"}
        if case != "dataloader":
            check_samples(rig)
    expected = alone(tmp_path / "alone", case, rig.spec)
    for worker in ("t.1", "t.2", "t.5", "t.6"):
        found = losses(tmp_path / "traces" / f"{worker}.trace")
        assert found == pytest.approx({iteration: expected[iteration] for iteration in found}, rel=1e-6)
    assert sorted(losses(tmp_path / "traces" / "t.1.trace")) == list(range(1, 13))


def test_ported_script_heals_to_the_losses_of_two_ranks_of_fsdp2(server: ForkServer, tmp_path: Path) -> None:
    """In the shape of torchtitan's loop. The first replica dies, and the second goes on alone."""
    examples = Path(__file__).parents[2] / "examples"
    changes = {"entry": str(examples / "recipes" / "fsdp.py"), "args": (), "global_batch": 8}
    with Rig(server, tmp_path, task(**changes)) as rig:
        begin(rig, *FOUR, fault={"t.1": "kill@iteration=5,at=backward"})
        lose(rig, "t.1")
        rig.signal("t.2", signal.SIGKILL)
        rig.until(lambda: "t.2" in rig.exits)
        rig.tell(2, ["t.3", "t.4"], urgent=True)
        complete(rig)
    ours = [loss for worker in ("t.1", "t.3") for loss in printed_losses((tmp_path / f"{worker}.log").read_text())]
    alone = printed_losses(run_ranks(examples / "fsdp_loop.py", tmp_path / "unused", free_port()))
    assert len(alone) == 12 and ours == pytest.approx(alone, abs=2e-6)


# --- the kill matrix -----------------------------------------------------------------------------


def endless(case: str = "") -> TaskSpec:
    return task(case, iterations=10**6, checkpoint=CheckpointSpec(dir="(the rig says)", interval=4))


def check(server: ForkServer, directory: Path, cells: list[Cell]) -> None:
    """Against an unbroken run of as many iterations."""
    run = Run(server, directory, endless(), cells, script=SCRIPT)
    run.carry_out()
    run.check_work(run.rig.spec.micro_batches)
    check_samples(run.rig)
    last = max(max(run.digests(shard)) for shard in range(RANKS))
    assert last >= run.refilled_at() + STEPS_AFTER
    spec = replace(endless(), iterations=last, checkpoint=CheckpointSpec(interval=0))
    known = unbroken(server, directory / "unbroken", spec)
    for shard in range(RANKS):
        found, expected = run.digests(shard), known.digests(shard)
        assert sorted(found) == list(range(1, max(found) + 1))
        wrong = [iteration for iteration in found if found[iteration] != expected[iteration]]
        assert not wrong, f"other bits from iteration {min(wrong)} on"


def cells_of(share: int) -> Iterator[Cell]:
    """Every `share`-th of all pairs of point and victim, kinds in turn."""
    for number, (point, victim) in enumerate(itertools.product(POINTS, VICTIMS)):
        for turn, action in enumerate(ACTIONS):
            if share == 1 or (number % share == 0 and turn == number // share % 3):
                yield Cell(action, point, victim)


def test_sharded_replica_survives_faults_with_the_same_bits(server: ForkServer, tmp_path: Path) -> None:
    check(server, tmp_path, list(cells_of(3)))


@pytest.mark.matrix
@pytest.mark.parametrize("cells", chains(list(cells_of(1)), 10))
def test_sharded_replica_survives_whole_kill_matrix(server: ForkServer, tmp_path: Path, cells: list[Cell]) -> None:
    check(server, tmp_path, cells)


# --- saved states --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 1])
def test_saved_state_goes_on_over_any_number_of_workers(server: ForkServer, tmp_path: Path, ranks: int) -> None:
    """Over as many: with the same bits. Over others it is cut anew, and the losses are those of the whole model."""
    spec = task(iterations=14, checkpoint=CheckpointSpec(dir="(the rig says)", interval=3, memory_interval=0))
    run = Run(server, tmp_path, spec, (), script=SCRIPT)
    with run.rig as rig:
        begin(rig, "t.1", "t.2", fault={"t.1": "kill@iteration=8,at=backward"})
        lose(rig, "t.1")
        rig.signal("t.2", signal.SIGKILL)
        rig.until(lambda: "t.2" in rig.exits)
        rig.reshape(replace(rig.spec, ep=ranks))
        workers = [f"t.{number}" for number in range(3, 3 + ranks)]
        rig.start(*workers)
        rig.until(lambda: rig.ready(*workers))
        rig.tell(2, workers, joiners=workers, urgent=True)
        complete(rig)
        assert {(regrouped(rig, worker).source, regrouped(rig, worker).iteration) for worker in workers} == {
            ("checkpoint", 7)
        }
    expected = alone(tmp_path / "alone", "", spec)
    found = losses(tmp_path / "traces" / "t.3.trace")
    assert found == pytest.approx({iteration: expected[iteration] for iteration in range(7, 15)}, rel=1e-6)
    if ranks == RANKS:
        run.chain.born = 2
        known = unbroken(server, tmp_path / "unbroken", replace(spec, checkpoint=CheckpointSpec(interval=0)))
        assert [run.digests(shard) for shard in range(RANKS)] == [known.digests(shard) for shard in range(RANKS)]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "changes", "sentence"),
    [
        (
            "whole",
            {},
            "first.weight is sharded by no fully_shard: its gradients would not be summed over the 2 workers",
        ),
        ("rest", {}, "first.weight is sharded by no fully_shard: its gradients would not be summed over the 2 workers"),
        ("hsdp", {}, "first.weight is on a mesh of 1 x 2, and a replica has 2 workers in one dimension"),
        ("", {"ep": 0, "tp": 2}, "first.weight is sharded by fully_shard in a replica of tp, pp or cp"),
        ("offload", {}, "fully_shard(offload_policy=CPUOffloadPolicy()) is not taken yet"),
        ("unsynchronized", {}, "fully_shard: set_requires_gradient_sync(False) was called"),
        ("accumulating", {}, "fully_shard: set_requires_gradient_sync(False): each backward's gradients are summed"),
        ("overlap", {}, "Hook.attach(overlap=True) is not taken beside fully_shard yet"),
    ],
)
def test_what_would_train_otherwise_ends_with_a_sentence(
    server: ForkServer, tmp_path: Path, case: str, changes: dict[str, object], sentence: str
) -> None:
    run = Run(server, tmp_path, task(case, **changes), (), script=SCRIPT)
    with run.rig as rig:
        rig.start("t.1", "t.2")
        rig.until(lambda: rig.ready("t.1", "t.2") or {"t.1", "t.2"} & rig.exits.keys())
        if rig.ready("t.1", "t.2"):
            rig.tell(1, ["t.1", "t.2"])
        rig.until(lambda: {"t.1", "t.2"} <= rig.exits.keys())
        errors = rig.of(ErrorReported)
    assert 1 in {os.waitstatus_to_exitcode(code) for code in rig.exits.values()}
    assert any(isinstance(error, ErrorReported) and sentence in error.message for error in errors), errors
