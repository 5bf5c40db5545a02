"""Optimizer state sharded over the replicas: Megatron's own bits, whoever is lost, joins or leaves.

Single losses at every point are in `test_kill_matrix.py`. Here: no loss, a node's, planned changes, and what is lost
with both holders of a part. Parameters are compared bit by bit with those of plain optimizers, failure-free.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from msgspec.structs import replace

from tests.integration import test_plain_megatron
from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_plain_megatron import ours, plain
from tests.integration.test_regroup import (
    THREE,
    begin_and_tell_in_mid_iteration,
    check_samples,
    complete,
    failure_free,
    last_commit,
    lose,
    regrouped,
    stopped,
    task,
)
from unicrond.events.vocabulary import CheckpointSaved, CheckpointSpec, StateLoaded, TaskSpec, WorkerPaused

Start: TypeAlias = Callable[[TaskSpec], AbstractContextManager[Rig]]
FOUR = ("t.1", "t.2", "t.3", "t.4")


@pytest.fixture
def rig(server: ForkServer, tmp_path: Path) -> Start:
    return partial(Rig, server, tmp_path)


def plain_task(data: Path) -> TaskSpec:
    """Captures after every iteration."""
    saves = CheckpointSpec(dir="(the rig says)", interval=0, memory_interval=1)
    return task(data, iterations=8, checkpoint=saves)


@pytest.fixture
def spec(data: Path) -> TaskSpec:
    return sharded(plain_task(data))


@pytest.fixture(scope="module")
def digest(server: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the parameters after a failure-free run of one replica with the plain optimizer."""
    run = failure_free(partial(Rig, server, tmp_path_factory.mktemp("control")), plain_task(data), 1)[1]
    assert run.completed is not None
    return run.completed.params_digest


def sharded(spec: TaskSpec) -> TaskSpec:
    return replace(spec, optimizer=replace(spec.optimizer, distributed=True))


def stop_all_in_iteration_5(run: Rig, workers: Sequence[str], nodes: Sequence[str]) -> None:
    for worker, node in zip(workers, nodes, strict=True):
        run.start(worker, fault="stop@iteration=5,micro_batch=1", node=node, memory=True)
    run.until(lambda: run.ready(*workers))
    run.tell(1, workers)
    run.until(lambda: all(stopped(run.pids[worker]) for worker in workers))


def lose_and_go_on(run: Rig, lost: Sequence[str], left: Sequence[str]) -> None:
    for worker in lost:
        run.signal(worker, signal.SIGKILL)
    lose(run, *lost)
    run.tell(2, left, urgent=True)
    for worker in left:
        run.signal(worker, signal.SIGCONT)
    complete(run)


def taken(run: Rig) -> list[StateLoaded]:
    return [said for said in run.of(StateLoaded) if isinstance(said, StateLoaded) and said.generation > 1]


@pytest.mark.parametrize(
    "variant", [pytest.param((), id="fp32", marks=pytest.mark.matrix), pytest.param(("--bf16",), id="bf16")]
)
def test_sharded_optimizer_matches_megatron_bits(
    server: ForkServer, data: Path, tmp_path: Path, variant: tuple[str, ...]
) -> None:
    spec = test_plain_megatron.task(data)
    expected = plain(server, tmp_path / "plain", spec, 2, "--bucket", "16384", *variant)
    found = ours(server, tmp_path / "ours", sharded(spec), 2, *variant)
    assert len(set(expected.digests)) == spec.iterations
    assert found.digests == expected.digests


def test_loss_of_two_of_four_parts_heals_from_copies(rig: Start, spec: TaskSpec, digest: str) -> None:
    """The second copies are on the other node: nothing is lost, nothing is read from memory or storage."""
    with rig(spec) as run:
        stop_all_in_iteration_5(run, FOUR, ["n1", "n1", "n2", "n2"])
        lose_and_go_on(run, ["t.1", "t.2"], ["t.3", "t.4"])
        assert not taken(run)
        assert {regrouped(run, worker).source for worker in ("t.3", "t.4")} == {"own"}
        assert run.completed is not None and run.completed.params_digest == digest
        check_samples(run)


def test_loss_of_both_holders_takes_whole_state(rig: Start, spec: TaskSpec, digest: str) -> None:
    """The survivor has the other parts only: it takes the newest whole state, says so, and comes to the same bits."""
    with rig(spec) as run:
        stop_all_in_iteration_5(run, THREE, ["n1"] * 3)
        newest = run.memory("n1").newest()
        assert newest is not None and newest.iteration >= 2
        lose_and_go_on(run, ["t.1", "t.2"], ["t.3"])
        (told,) = taken(run)
        assert (told.source, told.iteration) == ("memory", newest.iteration)
        assert regrouped(run, "t.3").iteration == newest.iteration + 1
        assert "all holders of a part of the state are lost" in (run.directory / "t.3.log").read_text()
        assert run.completed is not None and run.completed.params_digest == digest


def test_leaving_holders_hand_over_their_part(rig: Start, spec: TaskSpec, digest: str) -> None:
    """As planned, so they leave it with those who stay."""
    with rig(spec) as run:
        begin_and_tell_in_mid_iteration(run, FOUR, ["t.1", "t.4"])
        run.until(lambda: len(run.of(WorkerPaused)) == 2)
        run.quit("t.2", "t.3")
        complete(run)
        assert not taken(run)
        assert last_commit(run).micro_batches_by_rank == (6, 6)
        assert run.completed is not None and run.completed.params_digest == digest
        check_samples(run)


def test_whole_state_is_saved_if_all_leave(rig: Start, spec: TaskSpec, data: Path, digest: str) -> None:
    with rig(spec) as run:
        begin_and_tell_in_mid_iteration(run, THREE, [])
        run.until(lambda: len(run.of(WorkerPaused)) == 3)
        (saved,) = run.of(CheckpointSaved)
        assert isinstance(saved, CheckpointSaved)
        run.start("t.4", spec=plain_task(data))
        run.until(lambda: run.ready("t.4"))
        run.tell(3, ["t.4"], joiners=["t.4"])
        run.quit(*THREE)
        complete(run)
        assert regrouped(run, "t.4").source == "checkpoint"
        assert regrouped(run, "t.4").iteration == saved.iteration + 1
        assert run.completed is not None and run.completed.params_digest == digest
