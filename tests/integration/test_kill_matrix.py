"""A fault at every point of an iteration, of every kind, on the first rank and the last, with and without shards.

In the plain suite a subset: every point without shards, victims and kinds in turn, a sixth of all pairs of point and
victim with tensor and a sixth with pipeline parallel replicas. `make matrix` runs all of it. Everything is compared bit
by bit with a run of one replica that never failed; where the sum follows the deal, single faults are compared to 1e-6.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.integration.kill_chain import ACTIONS, POINTS, SHARED_POINTS, STEPS_AFTER, VICTIMS, WITHIN, Cell, Run
from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import (
    SMALL,
    THREE,
    apart,
    begin,
    check_samples,
    complete,
    failure_free,
    lose,
    parameters,
    stopped,
)
from unicrond.events.vocabulary import CheckpointSpec, OptimizerSpec, TaskSpec

OPTIMIZER = OptimizerSpec(lr=1e-3, warmup_iterations=2, decay_iterations=1000)
LAYOUTS = {"dp": (1, 1), "tp": (2, 1), "pp": (1, 2)}
Reference = Callable[[str, int], list[dict[int, str]]]


def matrix_task(data: Path, layout: str, **changes: object) -> TaskSpec:
    tp, pp = LAYOUTS[layout]
    fields: dict[str, object] = {
        "name": "m",
        "tp": tp,
        "pp": pp,
        "model": replace(SMALL, layers=pp, dropout=0.1),
        "optimizer": OPTIMIZER,
        "data": str(data),
        "global_batch": 6,
        "iterations": 10**6,
        "max_workers": 3 * tp * pp,
        "accumulation": "exact",
        # Everything that is computed is counted.
        "env": {"UNICRON_BUCKET_BYTES": "16384", "UNICRON_DETERMINISTIC": "off"},
        "checkpoint": CheckpointSpec(dir="(the rig says)", interval=4),
        **changes,
    }
    return TaskSpec(**fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference(server: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return failure_free_digests(server, data, tmp_path_factory)


def failure_free_digests(
    server: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory, **changes: object
) -> Reference:
    """Digests of the parameters after each iteration of a failure-free run of one replica, per shard."""
    known: dict[str, list[dict[int, str]]] = {}

    def upto(layout: str, iterations: int) -> list[dict[int, str]]:
        if layout not in known or iterations not in known[layout][0]:
            spec = matrix_task(data, layout, **{**changes, "iterations": iterations + 50})
            run = Run(server, tmp_path_factory.mktemp("reference"), replace(spec, checkpoint=CheckpointSpec()), ())
            with run.rig as rig:
                begin(rig, *run.workers(0))
                rig.until(lambda: rig.completed, 100)
            run.chain.born = 1
            known[layout] = [
                {iteration: digest for iteration, (digest,) in run.digests(shard).items()}
                for shard in range(spec.replica_workers)
            ]
        return known[layout]

    return upto


def check(
    server: ForkServer, directory: Path, data: Path, layout: str, cells: list[Cell], known: Reference,
    *, size: int = 0, **changes: object,
) -> Run:  # fmt: skip
    spec = matrix_task(data, layout, **changes)
    run = Run(server, directory, spec, cells, size)
    run.carry_out()
    run.check_work(spec.micro_batches)
    check_samples(run.rig)
    for shard in range(spec.replica_workers):
        found = run.digests(shard)
        expected = known(layout, max(found))[shard]
        assert sorted(found) == list(range(1, max(found) + 1))
        assert max(found) >= run.refilled_at() + STEPS_AFTER
        wrong = {iteration for iteration in found if found[iteration] != {expected[iteration]}}
        assert not wrong, f"other bits from iteration {min(wrong)} on"
    return run


def chains(cells: list[Cell], length: int) -> list[list[Cell]]:
    return [cells[first : first + length] for first in range(0, len(cells), length)]


def possible(cell: Cell, layout: str) -> bool:
    """One replica writes checkpoints: without shards, its only rank is the first. A pipeline computes all its
    micro-batches in one go: there is no moment between them."""
    alone_saves = cell.point == "saving" and cell.victim == "last" and layout == "dp"
    return not alone_saves and not (cell.point == "micro_batch=1" and layout == "pp")


def whole(layout: str, points: Sequence[str] = POINTS) -> list[Cell]:
    cells = [Cell(action, point, victim) for point in points for action in ACTIONS for victim in VICTIMS]
    return [cell for cell in cells if possible(cell, layout)]


def subset(layout: str) -> list[Cell]:
    """With dp every point, with victims and kinds in turn; of the other layouts a sixth of all pairs each (all: `make
    matrix`)."""
    turn = list(LAYOUTS).index(layout)
    cells = []
    for number, (point, victim) in enumerate(itertools.product(POINTS, VICTIMS)):
        cell = Cell(ACTIONS[(number + number // 6 + turn) % 3], point, victim)
        chosen = (number // 2 + number) % 2 == 0 if layout == "dp" else number % 6 == turn
        if chosen or (layout == "dp" and not possible(Cell(cell.action, point, _other(victim)), layout)):
            cells.append(cell)
    return [cell for cell in cells if possible(cell, layout)]


def _other(victim: str) -> str:
    return VICTIMS[1 - VICTIMS.index(victim)]


@pytest.mark.parametrize(
    ("layout", "cells"),
    [(layout, cells) for layout in LAYOUTS for cells in chains(subset(layout), 16)],
)
def test_trainer_survives_pairs_of_faults(
    server: ForkServer, data: Path, tmp_path: Path, reference: Reference, layout: str, cells: list[Cell]
) -> None:
    check(server, tmp_path, data, layout, cells, reference)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "cells"),
    [(layout, cells) for layout in LAYOUTS for cells in chains(whole(layout), 10)],
)
def test_trainer_survives_whole_kill_matrix(
    server: ForkServer, data: Path, tmp_path: Path, reference: Reference, layout: str, cells: list[Cell]
) -> None:
    check(server, tmp_path, data, layout, cells, reference)


# --- optimizer state sharded over the replicas -----------------------------------------------------

SHARDED = {"optimizer": replace(OPTIMIZER, distributed=True)}


def test_sharded_state_survives_selected_faults(
    server: ForkServer, data: Path, tmp_path: Path, reference: Reference
) -> None:
    """The reference is a replica alone with the plain optimizer; nobody ever goes back to a checkpoint."""
    cells = [
        Cell("kill", "backward", "first"),
        Cell("kill", "reduced", "last"),
        Cell("kill", "stepped", "first"),
        Cell("raise", "gathering", "last"),
        Cell("kill", "dividing", "first"),
        Cell("kill", "giving", "last"),
    ]
    check(server, tmp_path, data, "dp", cells, reference, **SHARDED)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "cells"),
    [(layout, cells) for layout in LAYOUTS for cells in chains(whole(layout, (*POINTS, *SHARED_POINTS)), 8)],
)
def test_sharded_state_survives_whole_kill_matrix(
    server: ForkServer, data: Path, tmp_path: Path, reference: Reference, layout: str, cells: list[Cell]
) -> None:
    check(server, tmp_path, data, layout, cells, reference, **SHARDED)


# --- sums that follow the deal -------------------------------------------------------------------


@pytest.fixture(scope="module")
def float_reference(
    server: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, torch.Tensor]]]:
    """Parameters after four iterations of a failure-free run, per shard."""
    known: dict[str, list[dict[str, torch.Tensor]]] = {}

    def of(layout: str) -> list[dict[str, torch.Tensor]]:
        if layout not in known:
            spec = matrix_task(data, layout, accumulation="float", iterations=4)
            run = failure_free(partial(Rig, server, tmp_path_factory.mktemp("reference")), spec, 2)[1]
            known[layout] = [parameters(run, spec.replica_workers, shard) for shard in range(spec.replica_workers)]
        return known[layout]

    return of


@pytest.mark.matrix
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("point", WITHIN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float_sums_survive_kill_matrix(
    server: ForkServer, data: Path, tmp_path: Path, layout: str, point: str, victim: str,
    float_reference: Callable[[str], list[dict[str, torch.Tensor]]],
) -> None:  # fmt: skip
    if not possible(Cell("kill", point, victim), layout):
        pytest.skip("there is no such moment")
    spec = matrix_task(data, layout, accumulation="float", iterations=4, checkpoint=CheckpointSpec(interval=0))
    workers = [f"t.{number}" for number in range(1, (3 if layout == "dp" else 4) + 1)]
    lost = workers[0] if victim == "first" else workers[-1]
    replica = (workers[: spec.replica_workers] if victim == "first" else workers[-spec.replica_workers :]) or [lost]
    where = point if "=" in point else f"at={point}"
    with Rig(server, tmp_path, spec) as run:
        begin(run, *workers, fault={lost: f"kill@iteration=3,{where}"})
        run.until(lambda: lost in run.exits)
        for worker in replica:
            run.signal(worker, signal.SIGKILL)
        run.until(lambda: all(worker in run.exits for worker in replica))
        run.tell(2, [worker for worker in workers if worker not in replica], urgent=True)
        complete(run)
        for shard, expected in enumerate(float_reference(layout)):
            assert apart(parameters(run, spec.replica_workers, shard), expected) <= 1e-6
        check_samples(run)


# --- variants of training --------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["--recompute", "--bf16"])
def test_variant_heals_from_faults(server: ForkServer, data: Path, tmp_path: Path, variant: str) -> None:
    """Activations computed again, and mixed precision, with joiners that receive the fp32 masters as well."""
    spec = matrix_task(data, "dp", args=(variant,), checkpoint=CheckpointSpec(interval=0))
    cells = [Cell("kill", "micro_batch=1", "first"), Cell("kill", "backward", "last")]
    run = Run(server, tmp_path, spec, cells)
    run.carry_out()
    run.check_work(spec.micro_batches)
    found = run.digests(0)
    directory = tmp_path / "alone"
    directory.mkdir()
    alone = Run(server, directory, replace(spec, iterations=max(found)), ())
    with alone.rig as rig:
        begin(rig, "t.1")
        complete(rig)
    alone.chain.born = 1
    assert found == alone.digests(0)


# --- what is saved, exactly ----------------------------------------------------------------------


def stop_all_and_lose_one(run: Rig, where: str) -> None:
    """All three stop at the same point of iteration 3; the second is killed there, the others go on."""
    begin(run, *THREE, fault=dict.fromkeys(THREE, f"stop@iteration=3,{where}"))
    run.until(lambda: all(stopped(run.pids[worker]) for worker in THREE))
    run.signal("t.2", signal.SIGKILL)
    lose(run, "t.2")


def test_final_buckets_survive_death(server: ForkServer, data: Path, tmp_path: Path, reference: Reference) -> None:
    """One bucket's sum is complete everywhere when the second of three dies: it has the dead one's share, and what the
    others compute again reaches the other buckets only."""
    run = Run(server, tmp_path, matrix_task(data, "dp", iterations=5), ())
    with run.rig as rig:
        stop_all_and_lose_one(rig, "at=partly")
        rig.tell(2, ["t.1", "t.3"], urgent=True)
        for worker in ("t.1", "t.3"):
            rig.signal(worker, signal.SIGCONT)
        complete(rig)
        assert rig.iterations()[3].micro_batches_repeated == 2
        for worker in ("t.1", "t.3"):
            assert "iteration 3 goes on, 1 of " in (tmp_path / f"{worker}.log").read_text()
    run.chain.born = 3
    expected = reference("dp", 5)[0]
    assert run.digests(0) == {iteration: {expected[iteration]} for iteration in range(1, 6)}
    run.check_work(6)


def test_survivors_step_at_once_after_agreement(server: ForkServer, data: Path, tmp_path: Path) -> None:
    """All have agreed when one dies: the others step at once, before any membership is told."""
    run = Run(server, tmp_path, matrix_task(data, "dp", iterations=5), ())
    with run.rig as rig:
        stop_all_and_lose_one(rig, "at=agreed")
        for worker in ("t.1", "t.3"):
            rig.signal(worker, signal.SIGCONT)
        rig.until(lambda: all(["stepped", "3"] in [line[:2] for line in run.trace(w)] for w in ("t.1", "t.3")))
        assert rig.reached(3)
        rig.tell(2, ["t.1", "t.3"], urgent=True)
        complete(rig)
        assert (rig.iterations()[3].generation, rig.iterations()[3].micro_batches_repeated) == (1, 0)
    run.chain.born = 3
    run.check_work(6)
