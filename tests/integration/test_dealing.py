"""Micro-batches are dealt by measured speed, and no bit changes: real workers, of which one takes longer (see
`regroup_rig.py` and `paced_gpt.py`)."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_regroup import (
    THREE,
    Start,
    begin,
    check_samples,
    complete,
    failure_free,
    lose,
    parameters,
    same,
    task,
)
from unicrond.events.vocabulary import ErrorReported, StragglerObserved, StragglerRecovered, TaskSpec

ENTRY = str(Path(__file__).with_name("paced_gpt.py"))
#: Of an ordinary micro-batch.
MS = 25
#: Iterations until another deal holds, and it is told what it has brought, also on a busy machine: 26 and 36 where
#: nothing else runs.
TOLD = 72


@pytest.fixture
def rig(server: ForkServer, tmp_path: Path) -> Start:
    return partial(Rig, server, tmp_path)


@pytest.fixture
def spec(data: Path) -> TaskSpec:
    """Four micro-batches for each of three replicas, and as many lanes."""
    return task(data, max_workers=3, iterations=TOLD)


def paced(spec: TaskSpec, factor: float, replica: int = 1, first: int = 1, last: int = 10**6) -> TaskSpec:
    """The task, of which one replica takes so many times as long in these iterations."""
    return replace(spec, entry=ENTRY, args=[*map(str, (MS, factor, replica, first, last)), "sleep"])


def counts(run: Rig, iteration: int) -> tuple[int, ...]:
    """How many micro-batches each replica has computed of the iteration."""
    return run.iterations()[iteration].micro_batches_by_rank


def last_counts(run: Rig) -> tuple[int, ...]:
    return run.committed[-1].micro_batches_by_rank


def test_slow_replica_is_dealt_less_and_bits_stay(rig: Start, spec: TaskSpec) -> None:
    expected, _ = failure_free(rig, spec, 3)
    with rig(paced(spec, 2.0)) as run:
        begin(run, *THREE)
        complete(run)
        assert counts(run, 20) == (4, 4, 4)
        assert counts(run, TOLD) == (5, 2, 5)
        assert same(parameters(run), expected)
        check_samples(run)
        events = [event for event in run.of(StragglerObserved) if event.deal is not None]  # type: ignore[attr-defined]
        last = events[-1]
        assert isinstance(last, StragglerObserved) and last.deal is not None
        assert (last.straggler, last.deal.dealt, last.deal.dealt_evenly) == ("t.2", 2, 4)
        assert last.deal.iteration_us and last.deal.ideal_us < last.deal.iteration_us_before - 2 * MS * 1000
        log = (run.directory / "t.1.log").read_text()
        assert "on micro-batches are dealt by speed: 5, 2, 5" in log


def test_recovered_replica_is_dealt_as_much_again(rig: Start, spec: TaskSpec) -> None:
    with rig(paced(replace(spec, iterations=3 * TOLD), 3.0, last=TOLD)) as run:
        begin(run, *THREE)
        run.until(lambda: run.of(StragglerRecovered) or run.completed)
        complete(run)
        assert counts(run, TOLD)[1] < 4
        assert counts(run, 3 * TOLD) == (4, 4, 4)


@pytest.mark.parametrize("victim", [0, 1], ids=["quick", "slow"])
def test_kill_under_uneven_deal_changes_no_bit(rig: Start, spec: TaskSpec, victim: int) -> None:
    """The survivors go on by the same speeds, in the middle of the iteration, and the one that joins gets its share."""
    expected, _ = failure_free(rig, spec, 3)
    lost = THREE[victim]
    staying = [worker for worker in THREE if worker != lost]
    with rig(paced(spec, 2.5)) as run:
        begin(run, *THREE)
        run.until(lambda: run.committed and last_counts(run) == (5, 2, 5))
        run.signal(lost, signal.SIGKILL)
        lose(run, lost)
        run.until(lambda: run.of(ErrorReported))
        healed = run.committed[-1].iteration + 1
        run.tell(2, staying, urgent=True)
        complete(run)
        assert counts(run, healed + 1) == ((3, 9) if lost == THREE[0] else (6, 6))
        assert same(parameters(run), expected)
        check_samples(run)


def test_newcomer_joins_uneven_deal(rig: Start, spec: TaskSpec) -> None:
    spec = replace(spec, iterations=TOLD + 30)
    expected, _ = failure_free(rig, spec, 3)
    with rig(paced(spec, 2.5)) as run:
        begin(run, "t.1", "t.2")
        run.until(lambda: run.committed and last_counts(run) == (9, 3))
        run.start("t.3")
        run.until(lambda: run.ready("t.3"))
        run.tell(2, THREE, joiners=["t.3"])
        complete(run)
        assert last_counts(run) == (5, 2, 5)
        assert same(parameters(run), expected)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_all_shards_of_a_replica_have_one_deal(rig: Start, spec: TaskSpec, layout: dict[str, int]) -> None:
    spec = replace(spec, max_workers=4, model=replace(spec.model, layers=2, vocab=256), **layout)
    expected, _ = failure_free(rig, spec, 2)
    with rig(paced(spec, 3.0)) as run:
        begin(run, "t.1", "t.2", "t.3", "t.4")
        complete(run)
        quick, slow = last_counts(run)
        assert quick > 6 > slow
        assert same(parameters(run, 2), expected)
        check_samples(run)


def test_sum_that_follows_the_deal_is_dealt_by_speed_too(rig: Start, spec: TaskSpec) -> None:
    with rig(paced(replace(spec, accumulation="float"), 2.0)) as run:
        begin(run, *THREE)
        complete(run)
        assert counts(run, TOLD) == (5, 2, 5)
        check_samples(run)
