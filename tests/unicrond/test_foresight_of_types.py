"""With several types of GPU the likeliest next plans are made ahead, and are the very plans of a fresh solve."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.replay.test_verify import verify
from tests.unicrond.cluster import MiniCluster
from tests.unicrond.serving import serving
from tests.unicrond.test_ctl import ctl
from tests.unicrond.test_gpu_types import FAST, SLOW, cluster_of, faster, with_task
from tests.unicrond.test_layouts import lose
from unicrond.core.planning import multi_type_lookahead as ahead
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.situation import NodeArrival, NodeLoss, Situation, TaskEnd, WorkerLoss
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Planner
from unicrond.core.rules.plan_problems import healthy_problem_of, problem_of, situation_of
from unicrond.core.rules.survey import Survey
from unicrond.events import vocabulary as v
from unicrond.intake.config import Config
from unicrond.service.coordinator import plan_precompute as foresight
from unicrond.service.coordinator.plan_precompute import Foresight
from unicrond.views.plan_preview import foreseen, unforeseen


def cluster() -> MiniCluster:
    """Three tasks; T of one is a line where it has not been."""
    made = with_task(cluster_of(1, 4, 3), "big", 3)
    with_task(made, "small", 2, weight=2.0)
    made.submit("line", min_workers=2, max_workers=4)
    made.run()
    return made


def at_rest(made: MiniCluster) -> Situation:
    situation = situation_of(Survey(made.state, made.policy))
    assert situation is not None
    return situation


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - a thread fills it
            await asyncio.sleep(0.002)


def test_foresight_matches_fresh_solve_of_own_problem() -> None:
    situation = at_rest(cluster())
    table = ahead.fill(Planner().refresh(situation))
    assert unforeseen(table) == 0
    for event in situation.expected():
        problem = situation.after(event)
        known, fresh = table.answer(problem), solve(problem)
        assert known == fresh and known.gpus == fresh.gpus and known.reason == fresh.reason, event
        for other in (
            replace(problem, d_running_us=problem.d_running_us + 1),
            replace(problem, churn_us=problem.churn_us + 1),
            replace(problem, tasks=(replace(problem.tasks[0], weight=99), *problem.tasks[1:])),
            replace(problem, pools=(replace(problem.pools[0], workers=problem.pools[0].workers - 1), problem.pools[1])),
        ):
            assert table.answer(other) is None, event


def test_foresight_solves_likeliest_events_first_within_limit() -> None:
    situation = at_rest(cluster())
    kinds = [type(event) for event in ahead.likeliest(situation)]
    assert kinds == sorted(kinds, key=[NodeLoss, NodeArrival, TaskEnd, WorkerLoss].index)
    assert set(kinds) == {NodeLoss, NodeArrival, TaskEnd, WorkerLoss}
    losses = [event.node for event in ahead.likeliest(situation) if isinstance(event, NodeLoss)]
    alike = [sum(n.slots for n in situation.nodes if n.load == situation.load_of[node].load) for node in losses]
    assert alike == sorted(alike, reverse=True)
    table = ahead.fill(Planner().refresh(situation), 3)
    assert len(table.ahead) == 3 == len(foreseen(table))
    assert unforeseen(table) == len(list(situation.expected(distinct=True))) - 3


async def test_foresight_holds_plan_of_lost_node() -> None:
    made = cluster()
    sight = Foresight(lambda: time.monotonic_ns() // 1000)
    sight.look_from(Survey(made.state, made.policy))
    running = asyncio.create_task(sight.run())
    await until(lambda: sight.table is not None and not unforeseen(sight.table))
    lose(made, "fast1")
    after = Survey(made.state, made.policy)
    told, healthy = sight.look_up(problem_of(after)), sight.look_up(healthy_problem_of(after))
    assert told is not None and healthy is not None
    assert told.method == "table" and told.solution == solve(problem_of(after))
    running.cancel()


async def test_request_interrupts_solve_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would wait for one processor."""
    begun, ended = threading.Event(), []

    def slow(problem: Problem, is_asked: Callable[[], bool]) -> Solution:
        begun.set()
        until_s = time.monotonic() + 5  # a thread that never ends would hold the test run
        while not is_asked() and time.monotonic() < until_s:
            time.sleep(0.001)
        assert is_asked()
        ended.append(problem)
        raise ahead.InterruptedSolve

    monkeypatch.setattr(foresight, "interruptible", slow)
    made = cluster()
    sight = Foresight(lambda: time.monotonic_ns() // 1000)
    sight.look_from(Survey(made.state, made.policy))
    running = asyncio.create_task(sight.run())
    await asyncio.to_thread(begun.wait, 30)
    lose(made, "fast1")
    problem = problem_of(Survey(made.state, made.policy))
    told = await sight.solve(problem)
    assert told.method == "fresh" and told.solution == solve(problem)
    await until(lambda: len(ended) == 1)
    assert sight.table is not None and not sight.table.ahead
    begun.clear()
    made.run()  # another plan: from there it begins anew
    sight.look_from(Survey(made.state, made.policy))
    await asyncio.to_thread(begun.wait, 30)
    assert len(ended) == 1
    sight.look_from(Survey(made.state, made.policy))  # nothing is new
    assert not sight._request.is_set()
    made.submit("more", min_workers=1, max_workers=2, gpus=faster(2, 2))
    made.run()
    sight.look_from(Survey(made.state, made.policy))
    await until(lambda: len(ended) == 2)
    await sight.solve(problem)
    running.cancel()


def test_solve_ahead_stops_between_pools() -> None:
    problem = at_rest(cluster()).after(TaskEnd("line"))
    asked: list[int] = []

    def soon() -> bool:
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(ahead.InterruptedSolve):
        ahead.interruptible(problem, soon)
    assert len(asked) == 4
    assert ahead.interruptible(problem, lambda: False) == solve(problem)


def test_foresight_rows_cover_both_gpu_types() -> None:
    rows = foreseen(ahead.fill(Planner().refresh(at_rest(cluster()))))
    assert {gpu for row in rows for gpu in row.gpus.values()} == {SLOW, FAST}


async def test_coordinator_takes_plan_from_table_and_log_verifies(tmp_path: Path) -> None:
    """The whole way; `plan table` says how many events have no plan yet."""
    made = cluster()
    async with serving(tmp_path, list(made.log), config=Config(policy=made.policy)) as served:
        sight = served.coordinator.foresight
        await until(lambda: sight.table is not None and not unforeseen(sight.table))
        told = await ctl("plan", "table", url=served.url)
        assert told.code == 0 and f" on {SLOW}" in told.out and "more event" not in told.out
        sight.table.ahead.popitem()  # type: ignore[union-attr]
        assert "1 more event may come; with several types" in (await ctl("plan", "table", url=served.url)).out
        seq = await served.log.last_seq()
        evidence = v.Evidence(beat_seq=1, beat_at_us=1)
        served.coordinator._post(v.NodeLost(node="fast0", evidence=evidence, reason="the test says so"))
        await served.until(v.PlanAdopted, seq)
        assert served.coordinator.state.plan.method == "table"
        assert "fast0" not in str(served.coordinator.state.plan.assignments)
        last = await served.log.last_seq()
        entries = [entry async for entry in served.log.read(until_seq=last)]
    assert verify(entries).decisions > 10, "what differs raises"
