"""Micro-batches are dealt by measured speed, and no bit changes: real workers, of which one takes longer (see
`regroup_rig.py` and `paced_gpt.py`)."""

from __future__ import annotations

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
from unicrond.agents.protocol.messages import IterationCommitted
from unicrond.events.vocabulary import ErrorReported, StragglerObserved, StragglerRecovered, TaskSpec

ENTRY = str(Path(__file__).with_name("paced_gpt.py"))
#: Of an ordinary micro-batch.
MS = 25
#: Iterations until another deal holds, and until it is told what it has brought.
DEALT, TOLD = 32, 50


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


def milliseconds(commits: list[IterationCommitted]) -> float:
    """The median time of these iterations."""
    durations = sorted(commit.duration_us for commit in commits)
    return durations[len(durations) // 2] / 1000


def test_slow_replica_is_dealt_less_and_bits_stay(rig: Start, spec: TaskSpec) -> None:
    expected, _ = failure_free(rig, spec, 3)
    with rig(paced(spec, 2.0)) as run:
        begin(run, *THREE)
        complete(run)
        assert counts(run, 20) == (4, 4, 4)
        assert counts(run, DEALT) == counts(run, TOLD) == (5, 2, 5)
        assert same(parameters(run), expected)
        check_samples(run)
        before, since = (milliseconds(run.committed[first : first + 15]) for first in (5, DEALT))
        assert since < before - MS, "8 micro-batches' time, then 5"
        events = [event for event in run.of(StragglerObserved) if event.deal is not None]  # type: ignore[attr-defined]
        last = events[-1]
        assert isinstance(last, StragglerObserved) and last.deal is not None
        assert (last.straggler, last.deal.dealt, last.deal.dealt_evenly) == ("t.2", 2, 4)
        assert last.deal.iteration_us_before > last.deal.iteration_us > 0
        assert last.deal.ideal_us < last.deal.iteration_us_before - 2 * MS * 1000
        log = (run.directory / "t.1.log").read_text()
        assert "on micro-batches are dealt by speed: 5, 2, 5" in log


def test_recovered_replica_is_dealt_as_much_again(rig: Start, spec: TaskSpec) -> None:
    with rig(paced(replace(spec, iterations=150), 3.0, last=DEALT)) as run:
        begin(run, *THREE)
        run.until(lambda: run.of(StragglerRecovered) or run.completed)
        complete(run)
        assert counts(run, DEALT)[1] < 4
        assert counts(run, 150) == (4, 4, 4)


@pytest.mark.parametrize("victim", [0, 1], ids=["quick", "slow"])
def test_kill_under_uneven_deal_changes_no_bit(rig: Start, spec: TaskSpec, victim: int) -> None:
    """The survivors go on by the same speeds, in the middle of the iteration, and the one that joins gets its share."""
    spec = replace(spec, iterations=DEALT + 4)
    expected, _ = failure_free(rig, spec, 3)
    lost = THREE[victim]
    staying = [worker for worker in THREE if worker != lost]
    with rig(paced(spec, 3.0)) as run:
        begin(run, *THREE, fault={lost: f"kill@iteration={DEALT},micro_batch=1"})
        lose(run, lost)
        run.until(lambda: run.of(ErrorReported))
        run.tell(2, staying, urgent=True)
        complete(run)
        assert counts(run, DEALT - 1)[1] < 4
        if lost == THREE[0]:
            slow, quick = counts(run, DEALT + 1)
            assert slow == 3 and quick == 9
        else:
            assert counts(run, DEALT + 1) == (6, 6)
        assert same(parameters(run), expected)
        check_samples(run)


def test_newcomer_joins_uneven_deal(rig: Start, spec: TaskSpec) -> None:
    spec = replace(spec, iterations=DEALT + 30)
    expected, _ = failure_free(rig, spec, 3)
    with rig(paced(spec, 3.0)) as run:
        begin(run, "t.1", "t.2")
        run.until(lambda: run.committed and counts(run, run.committed[-1].iteration) == (9, 3))
        run.start("t.3")
        run.until(lambda: run.ready("t.3"))
        run.tell(2, THREE, joiners=["t.3"])
        complete(run)
        assert run.committed[-1].micro_batches_by_rank == (5, 2, 5)
        assert same(parameters(run), expected)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_all_shards_of_a_replica_have_one_deal(rig: Start, spec: TaskSpec, layout: dict[str, int]) -> None:
    spec = replace(spec, max_workers=4, iterations=DEALT + 10, model=replace(spec.model, layers=2, vocab=256), **layout)
    expected, _ = failure_free(rig, spec, 2)
    with rig(paced(spec, 3.0)) as run:
        begin(run, "t.1", "t.2", "t.3", "t.4")
        complete(run)
        quick, slow = run.committed[-1].micro_batches_by_rank
        assert quick > 6 > slow
        assert all(same(parameters(run, 2, shard), expected) for shard in (0,))
        check_samples(run)


def test_sum_that_follows_the_deal_is_dealt_by_speed_too(rig: Start, spec: TaskSpec) -> None:
    with rig(paced(replace(spec, accumulation="float"), 2.0)) as run:
        begin(run, *THREE)
        complete(run)
        assert counts(run, TOLD) == (5, 2, 5)
        check_samples(run)
