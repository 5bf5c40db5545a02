"""The table against fresh solves and against every plan there is; rows that are reused; the ways of a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from tests.planning.clusters import random_situation
from tests.planning.oracle import brute_force
from unicrond.core.planning.problem import Problem, ProblemError, TaskProblem
from unicrond.core.planning.situation import (
    NextEvent,
    NodeArrival,
    NodeLoad,
    NodeLoss,
    Situation,
    TaskEnd,
    TaskLaunch,
    WorkerLoss,
)
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Planner

LINEAR = tuple(range(0, 200, 10))


def next_situation(situation: Situation, event: NextEvent, solution: Solution) -> Situation:
    """What stands after the event once its plan is adopted (nodes keep their tasks: enough for the planner)."""
    tasks = tuple(replace(task, faulty=False, workers=workers) for task, workers in solution)
    there = {task.name for task in tasks}
    nodes = [replace(n, tasks=n.tasks & there) for n in situation.nodes if event != NodeLoss(n.name)]
    if isinstance(event, NodeArrival):
        nodes.append(NodeLoad(f"new{len(nodes)}-{situation.workers}", event.slots))
    queued = None if isinstance(event, TaskLaunch) else situation.queued
    return replace(situation, nodes=tuple(nodes), tasks=tasks, queued=queued)


def test_table_matches_fresh_solve_and_brute_force(each_kernel: str) -> None:
    """Thousands of events on random small clusters, ties included."""
    entries = checked = 0
    for seed in range(1200):
        situation = random_situation(Random(seed))
        table = Planner().refresh(situation)
        for event in situation.expected():
            problem = situation.after(event)
            fresh = solve(problem)
            assert table.solution(event) == fresh, (seed, event)
            assert table.answer(problem) == fresh, (seed, event)
            entries += 1
            small = all(len(t.curve) == 0 or t.curve.flops.max() < 1000 for t in problem.tasks)
            if small and entries % 4 == 0:
                checked += 1
                assert fresh.workers == brute_force(problem)[0], (seed, event)
    assert entries > 5000 and checked > 500


def test_table_with_turns_matches_fresh_solve(each_kernel: str) -> None:
    for seed in range(200):
        situation = random_situation(Random(seed))
        turns = Random(-seed).sample(range(5), min(5, len(situation.tasks)))
        tasks = tuple(
            replace(t, turn=turn, floor=t.floor or 2) for t, turn in zip(situation.tasks, turns, strict=False)
        )
        situation = replace(situation, tasks=tasks)
        table = Planner().refresh(situation)
        for event in situation.expected():
            assert table.solution(event) == solve(situation.after(event)), (seed, event)


def test_table_matches_fresh_solve_on_larger_clusters(each_kernel: str) -> None:
    for seed in range(12):
        situation = random_situation(Random(seed), most_tasks=9, most_workers=40)
        table = Planner().refresh(situation)
        for event in situation.expected():
            solution, fresh = table.solution(event), solve(situation.after(event))
            assert solution == fresh or (solution is None and fresh.unmet_floors), (seed, event)


def test_refresh_reuses_rows_and_keeps_plans(each_kernel: str) -> None:
    """After each event the next table reuses what it can; every entry is still the fresh plan."""
    reused = computed = 0
    for seed in range(120):
        rng = Random(seed)
        situation, planner = random_situation(rng), Planner()
        table = planner.refresh(situation)
        for _ in range(4):
            event = rng.choice(list(situation.expected()))
            chosen = table.solution(event)
            assert chosen is not None
            situation = next_situation(situation, event, chosen)
            table = planner.refresh(situation)
            reused, computed = reused + table.effort.rows_reused, computed + table.effort.rows_computed
            for each in situation.expected():
                assert table.solution(each) == solve(situation.after(each)), (seed, each)
    assert reused > computed / 10


def test_planner_solves_events_outside_table_to_same_plan(each_kernel: str) -> None:
    """Several faults at once, tasks gone meanwhile, other numbers of workers: whichever way, the same plan."""
    ways: Counter[str] = Counter()
    for seed in range(250):
        rng = Random(seed)
        situation, planner = random_situation(rng), Planner()
        planner.refresh(situation)
        for _ in range(6):
            workers = max(0, situation.workers - rng.randint(0, 3))
            tasks = tuple(replace(t, faulty=rng.random() < 0.5) for t in situation.lineup if rng.random() < 0.8)
            d_running = situation.d_running_us(workers)
            problem = Problem(workers, d_running, situation.d_transition_us, tasks, situation.churn_us)
            answer = planner.answer(problem)
            ways[answer.method] += 1
            assert answer.solution == solve(problem), seed
    assert min(ways["table"], ways["incremental"], ways["fresh"]) > 100


@pytest.mark.parametrize("change", [{"weight": 5}, {"workers": 3}, {"floor": 3}, {"throughput": LINEAR[:4]}])
def test_table_misses_slightly_different_problem(change: dict[str, object]) -> None:
    situation, planner = two_tasks(), Planner()
    planner.refresh(situation)
    expected = situation.after(NodeLoss("n1"))
    assert planner.answer(expected).method == "table"
    other = replace(expected, tasks=(expected.tasks[0], replace(expected.tasks[1], **change)))  # type: ignore[arg-type]
    answer = planner.answer(other)
    assert answer.method != "table"
    assert answer.solution == solve(other)


def two_tasks() -> Situation:
    """a: 4 workers on n1; b: 3 on n2 and 1 on n3; c waits. n4 is idle."""
    return Situation(
        nodes=(
            NodeLoad("n1", 4, frozenset({"a"})),
            NodeLoad("n2", 3, frozenset({"b"})),
            NodeLoad("n3", 2, frozenset({"b"})),
            NodeLoad("n4", 1),
        ),
        tasks=(
            TaskProblem("a", 1, 4, LINEAR, min_workers=1, max_workers=8, floor=1),
            TaskProblem("b", 1, 4, LINEAR, min_workers=1, max_workers=8, floor=1),
        ),
        mtbf_us=10**9,
        d_transition_us=10**6,
        queued=TaskProblem("c", 1, 0, LINEAR, min_workers=1, floor=2),
        join_slots=(4,),
    )


def test_situation_gives_problem_of_each_event_kind() -> None:
    situation = two_tasks()
    assert [type(event).__name__ for event in situation.expected()] == (
        ["WorkerLoss"] * 2 + ["NodeLoss"] * 4 + ["NodeArrival"] + ["TaskEnd"] * 2 + ["TaskLaunch"]
    )

    def posed(event: NextEvent) -> tuple[int, int, list[str], list[str]]:
        problem = situation.after(event)
        faulty = [task.name for task in problem.tasks if task.faulty]
        return problem.workers, int(problem.d_running_us), [task.name for task in problem.tasks], faulty

    assert posed(WorkerLoss("b")) == (9, 10**9 // 9, ["a", "b"], ["b"])
    assert posed(NodeLoss("n1")) == (6, 10**9 // 6, ["a", "b"], ["a"])
    assert posed(NodeLoss("n4")) == (9, 10**9 // 9, ["a", "b"], [])
    assert posed(NodeArrival(4)) == (14, 10**9 // 14, ["a", "b"], [])
    assert posed(TaskEnd("a")) == (10, 10**8, ["b"], [])
    assert posed(TaskLaunch("c")) == (10, 10**8, ["a", "b", "c"], [])
    for stranger in (NodeLoss("n9"), TaskEnd("c"), TaskLaunch("a"), WorkerLoss("c")):
        with pytest.raises(KeyError):
            situation.after(stranger)


def test_look_up_returns_whole_plan() -> None:
    table = Planner().refresh(two_tasks())
    assert table.look_up(TaskEnd("a")) == (0, 8, 0)
    assert table.look_up(NodeLoss("n1")) is not None
    assert table.look_up(NodeLoss("n9")) is None
    assert table.solution(NodeLoss("n9")) is None
    finished = table.solution(TaskEnd("a"))
    assert finished is not None and finished.workers == (8,)


def test_nodes_with_same_problem_share_table_entry() -> None:
    situation = two_tasks()
    twin = replace(situation, nodes=(*situation.nodes, NodeLoad("n5", 3, frozenset({"b"}))))
    table = Planner().refresh(twin)
    assert table.look_up(NodeLoss("n2")) == table.look_up(NodeLoss("n5"))
    assert table.effort.scenarios == len(list(twin.expected())) - 1


def test_refresh_reuses_rows_around_changed_task() -> None:
    situation, planner = two_tasks(), Planner()
    first = planner.refresh(situation)
    assert first.effort.rows_reused == 0
    again = planner.refresh(situation)
    assert again.effort.rows_computed == 0
    assert again.effort.rows_reused == first.effort.rows_computed
    waiting = replace(situation, queued=None)  # c stood last: the rows before it stay
    assert planner.refresh(waiting).effort.rows_reused > 0


def test_situation_refuses_faulty_tasks() -> None:
    situation = two_tasks()
    for wrong in (
        {"tasks": (situation.tasks[0],) * 2},
        {"tasks": (replace(situation.tasks[0], faulty=True),)},
        {"queued": situation.tasks[0]},
        {"nodes": (NodeLoad("n1", 1, frozenset({"c"})),)},
    ):
        with pytest.raises(ProblemError):
            replace(situation, **wrong)  # type: ignore[arg-type]
