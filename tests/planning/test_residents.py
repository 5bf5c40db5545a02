"""Plans beside closed nodes: of the seats there only the residents count, and all others share the open seats."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from tests.planning.clusters import (
    random_problem,
    random_situation,
    random_task,
    with_priorities,
    with_residents,
    with_turns,
)
from tests.planning.oracle import brute_force, plain_dp, shortfall
from tests.planning.pools import NOTHING, crowded_pools, every_deal, gap, random_pools
from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning import solver
from unicrond.core.planning.feasibility import has_room
from unicrond.core.planning.problem import Alternative, Curve, Problem, ProblemError, TaskProblem
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Planner
from unicrond.core.planning.unlimited_integers import solve_exactly
from unicrond.events.vocabulary.shape import Shape


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Collect the problems that one pass of the dynamic programme solves each."""
    problems: list[Problem] = []
    solve_sums = solver._solve_sums
    monkeypatch.setattr(solver, "_solve_sums", lambda problem: problems.append(problem) or solve_sums(problem))
    return problems


def beside_closed(seed: int, most_tasks: int, most_workers: int) -> Problem:
    """Return a random problem with priorities, turns and closed nodes."""
    rng = Random(seed)
    problem = with_priorities(rng, random_problem(rng, most_tasks, most_workers))
    return with_residents(rng, with_turns(rng, problem) if rng.random() < 0.3 else problem)


def test_exact_solver_gives_canonical_plan() -> None:
    differ = 0
    for seed in range(1000):
        problem = beside_closed(seed, 3, 8)
        plan, objective = brute_force(problem)
        solution = solve_exactly(problem)
        assert (solution.workers, solution.exact_objective) == (plan, objective), seed
        differ += solve_exactly(problem.sums_only).workers != plan
    assert differ > 150, "the seats of residents decide nothing"


def test_solver_matches_plain_programme_on_64_workers(each_kernel: str, solves: list[Problem]) -> None:
    """One pass of the dynamic programme for each plan, whatever has ended and left its seats on closed nodes."""
    short = 0
    for seed in range(40):
        rng = Random(seed)
        tasks = tuple(random_task(rng, f"t{n}", 20, faulty=rng.random() < 0.3) for n in range(8))
        problem = with_priorities(rng, Problem(64, rng.choice((5, 10)), rng.choice((1, 7)), tasks, rng.choice((0, 3))))
        problem = with_residents(rng, problem)
        missed, objective = plain_dp(problem)
        solution = solve(problem)
        assert has_room(solution), seed
        assert shortfall(problem, solution.workers)[:-1] == missed[:-1], seed
        assert objective - Fraction(solution.resolution) <= solution.exact_objective <= objective, seed
        short += not has_room(replace(solve(problem.sums_only), problem=problem))
    assert short > 10, "the closed seats decide nothing"
    assert len(solves) == 2 * 40


def test_large_tasks_end_beside_cordoned_nodes(solves: list[Problem]) -> None:
    """Four tasks remain of eight; those that stood on the closed nodes have left 26 seats that nobody may take."""
    curve = Curve({count: count**0.9 * 1e14 for count in range(1, 65)})
    tasks = tuple(
        TaskProblem(f"t{n}", 1 + n / 8, workers, curve, min_workers=1, floor=1, residents=(1,) * (n % 2 * 3))
        for n, workers in enumerate((3, 9, 14, 12))
    )
    problem = Problem(64, 10**9, 10**7, tasks, closed=32)
    _, objective = plain_dp(problem)
    solution = solve(problem)
    assert sum(solution.workers) == 32 + 6 and not solution.unmet_floors
    assert objective - Fraction(solution.resolution) <= solution.exact_objective <= objective
    assert len(solves) == 1


def test_kernels_give_same_plan() -> None:
    for seed in range(60):
        problem = beside_closed(seed, 12, 64)
        kernel.use("numba")
        compiled = solve(problem)
        kernel.use("numpy")
        assert solve(problem) == compiled, seed


def test_table_and_rows_give_fresh_plan(each_kernel: str) -> None:
    """Whatever the table foresaw without residents is taken only where it is the plan beside them too."""
    methods = []
    for seed in range(150):
        rng = Random(seed)
        planner, situation = Planner(), random_situation(rng)
        planner.refresh(situation)
        for event in situation.expected():
            problem = with_residents(rng, situation.after(event))
            answer = planner.answer(problem)
            assert answer.solution == solve(problem), (seed, event)
            methods.append(answer.method)
    assert min(methods.count("table"), methods.count("fresh")) > 50


def test_floor_weighs_open_seats_alone() -> None:
    """Both floors are met: of the larger one only one worker is not there already."""
    old = TaskProblem("old", 1, 4, Curve({4: 10}), floor=4, min_workers=4, residents=(1, 1, 1))
    new = TaskProblem("new", 1, 0, Curve({2: 1}), floor=2, min_workers=2)
    assert solve(Problem(6, 10, 1, (old, new), closed=3)).workers == (4, 2)
    assert solve(Problem(6, 10, 1, (old, new), closed=4)).workers == (4, 0)
    assert solve(Problem(6, 10, 1, (replace(old, residents=(1, 1)), new), closed=3)).workers == (4, 0)
    assert solve_exactly(Problem(6, 10, 1, (old, new), closed=3)).workers == (4, 2)


def test_residents_count_by_whole_replicas(each_kernel: str) -> None:
    """Of three pairs one has both workers on a closed node, the others one each: the task gives up one of these, and an
    open seat with it."""
    pairs = TaskProblem("pairs", 3, 6, Curve({2: 2, 4: 4, 6: 6}), unit=2, residents=(2, 1, 1))
    ones = TaskProblem("ones", 4, 0, Curve({1: 1, 2: 2}))
    assert [pairs.open_seats(count) for count in (0, 2, 4, 6, 8)] == [0, 0, 1, 2, 4]
    assert solve(Problem(7, 100, 1, (pairs, ones), closed=4)).workers == (6, 1)
    assert solve(Problem(7, 100, 1, (pairs, replace(ones, weight=8)), closed=4)).workers == (4, 2)
    assert solve(Problem(6, 100, 1, (pairs, replace(ones, weight=8)), closed=4)).workers == (2, 2)


def test_ties_are_broken_as_on_open_nodes(each_kernel: str) -> None:
    """None of these choices needs a seat: the present one if none is better, else the fewest workers."""
    task = TaskProblem("t", 1, 4, Curve({2: 5, 3: 5, 4: 5}), faulty=True, residents=(1, 1, 1, 1))
    assert solve(Problem(5, 10, 1, (task,), closed=4)).workers == (4,)
    better = replace(task, throughput=Curve({2: 6, 3: 6, 4: 5}))
    assert solve(Problem(5, 10, 1, (better,), closed=4)).workers == (2,)


def test_groups_are_packed_into_open_nodes() -> None:
    """The pair on the closed node stays. A second one would need both slots of an open node: they have one each."""
    pairs = TaskProblem("pairs", 9, 2, Curve({2: 2, 4: 4}), unit=2, tp=2, residents=(2,))
    ones = TaskProblem("ones", 1, 0, Curve({1: 1, 2: 2}))
    assert solve(Problem(4, 100, 1, (pairs, ones), seats=((1, 2),), closed=2)).workers == (2, 2)
    assert solve(Problem(4, 100, 1, (pairs, ones), seats=((2, 1),), closed=2)).workers == (4, 0)


def test_pools_have_closed_nodes_of_their_own() -> None:
    """A task has residents in its own pool alone, and each pool its own closed seats."""
    differ = 0
    for seed in range(20):
        rng = Random(seed)
        problem = random_pools(rng, 4, 2, 4)
        left = {pool.gpu: 0 for pool in problem.pools}
        tasks = []
        for task in problem.tasks:
            counts = (task.unit,) * rng.randint(0, task.workers // task.unit)
            left[task.gpu] += sum(counts)
            tasks.append(replace(task, residents=counts))
        pools = tuple(replace(pool, closed=left[pool.gpu], seats=()) for pool in problem.pools)
        closed = replace(problem, tasks=tuple(tasks), pools=pools, closed=sum(left.values()))
        solution = solve(closed)
        for pool in pools:
            choices = zip(closed.tasks, solution.workers, solution.layouts, solution.gpus, strict=True)
            needs = [task.open_seats(count, layout) for task, count, layout, gpu in choices if gpu == pool.gpu]
            assert sum(needs) <= pool.workers - pool.closed, seed
        assert abs(gap(solution, every_deal(closed))) < NOTHING, seed
        differ += solution.workers != solve(problem).workers
    assert differ > 5, "the seats of residents decide nothing"


@pytest.mark.parametrize("seed", (153, 902, 2337, *range(8)))
def test_deal_is_not_ruled_out_by_residents_of_one_pool(seed: int) -> None:
    """What a task has without an open seat it has in its own pool alone, not in each that it is tried in."""
    rng, problem = Random(seed), crowded_pools(seed)
    closed = {pool.gpu: 0 for pool in problem.pools}
    tasks = []
    for task in problem.tasks:
        counts = (task.unit,) * rng.randint(0, task.workers // task.unit)
        closed[task.gpu] += sum(counts)
        tasks.append(replace(task, residents=counts))
    pools = tuple([replace(pool, workers=8 + closed[pool.gpu], closed=closed[pool.gpu]) for pool in problem.pools])
    beside = sum(closed.values())
    problem = replace(problem, tasks=tuple(tasks), pools=pools, workers=16 + beside, closed=beside)
    found, best = solve(problem), every_deal(problem)
    assert found.gap >= gap(found, best) - NOTHING


def test_problem_refuses_impossible_residents() -> None:
    task = TaskProblem("t", 1, 4, Curve({2: 2, 4: 4}), unit=2, residents=(2, 1))
    for residents in ((3,), (0,), (1, 2)):
        with pytest.raises(ProblemError, match="most first"):
            replace(task, residents=residents)
    for closed in (2, 5):
        with pytest.raises(ProblemError, match="closed is"):
            Problem(4, 1, 1, (task,), closed=closed)
    with pytest.raises(ProblemError, match="alternatives"):
        Problem(4, 1, 1, (replace(task, alternatives=(Alternative(Shape(), Curve({})),)),), closed=3)
