"""Counts and layouts together against every plan there is, with prices of moves and seats, in both kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from tests.planning.clusters import (
    random_problem_of_layouts,
    random_seats,
    random_situation,
    with_layouts,
    with_residents,
    with_turns,
)
from tests.planning.oracle import brute_force_in, finds_room, shortfall
from unicrond.core.planning import feasibility as seating
from unicrond.core.planning.feasibility import groups_of, has_room, packs
from unicrond.core.planning.problem import Alternative, Curve, Prices, Problem, TaskProblem
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Planner
from unicrond.core.planning.unlimited_integers import solve_exactly
from unicrond.events.vocabulary.shape import Shape


def small_numbers(problem: Problem) -> bool:
    curves = [curve for task in problem.tasks for curve in (task.curve, *(other.curve for other in task.alternatives))]
    return all(len(curve) == 0 or curve.flops.max() < 1000 for curve in curves)


def assert_best(problem: Problem, seed: int) -> bool:
    """The optimum with seats for all; where numbers are small the very plan, ties included. Whether they are."""
    workers, layouts, objective = brute_force_in(problem)
    solution = solve(problem)
    assert objective - Fraction(solution.resolution) <= solution.exact_objective <= objective, seed
    assert has_room(solution), seed
    assert shortfall(problem, solution.workers) == shortfall(problem, workers), seed
    if small_numbers(problem):
        assert (solution.workers, solution.layouts) == (workers, layouts), seed
        return True
    return False


def test_solver_matches_brute_force(each_kernel: str) -> None:
    exact = sum(assert_best(random_problem_of_layouts(Random(seed)), seed) for seed in range(1500))
    assert exact > 600


def test_solver_with_residents_matches_brute_force(each_kernel: str) -> None:
    differ = 0
    for seed in range(1000):
        rng = Random(seed)
        problem = with_residents(rng, random_problem_of_layouts(rng))
        assert_best(problem, seed)
        differ += solve(problem).workers != solve(problem.sums_only).workers
    assert differ > 100, "the seats of residents decide nothing"


def test_solver_with_turns_matches_brute_force(each_kernel: str) -> None:
    for seed in range(400):
        assert_best(with_turns(Random(-seed), random_problem_of_layouts(Random(seed))), seed)


def test_exact_solver_gives_canonical_plan() -> None:
    for seed in range(600):
        problem = random_problem_of_layouts(Random(seed), most_tasks=3, most_workers=7)
        workers, layouts, objective = brute_force_in(problem)
        solution = solve_exactly(problem)
        assert (solution.workers, solution.layouts, solution.exact_objective) == (workers, layouts, objective), seed


def test_plan_table_matches_fresh_solve(each_kernel: str) -> None:
    for seed in range(150):
        rng = Random(seed)
        situation = random_situation(rng, most_workers=8)
        tasks = tuple(with_layouts(rng, task, 8) for task in situation.tasks)
        queued = with_layouts(rng, situation.queued, 8) if situation.queued else None
        situation = replace(situation, tasks=tasks, queued=queued)
        table = Planner().refresh(situation)
        for event in situation.expected():
            assert table.solution(event) == solve(situation.after(event)), (seed, event)


def test_packing_matches_brute_force() -> None:
    found = Counter()
    for seed in range(3000):
        rng = Random(seed)
        seats = random_seats(rng, rng.randint(0, 14))
        groups = Counter(rng.choice((1, 1, 2, 2, 4)) for _ in range(rng.randint(0, 8)))
        slots = [size for size, nodes in seats for _ in range(nodes)]
        expected = finds_room(sorted(groups.elements(), reverse=True), slots)
        assert packs(groups, seats) is expected, seed
        found[expected] += 1
    assert min(found.values()) > 500


def test_unpackable_plan_is_solved_again(each_kernel: str) -> None:
    """Two nodes with three slots each: three groups of two add up to six, and two find room."""
    pairs = TaskProblem("pairs", 2, 0, Curve({2: 20, 4: 40, 6: 60}), unit=2, tp=2)
    ones = TaskProblem("ones", 1, 0, Curve({1: 10, 2: 20}))
    assert solve(Problem(6, 10, 1, (pairs, ones))).workers == (6, 0)
    assert solve(Problem(6, 10, 1, (pairs, ones), seats=((3, 2),))).workers == (4, 2)


def test_solver_picks_other_layout_if_present_one_lacks_room() -> None:
    """tp 2 on two half-free nodes."""
    held = TaskProblem("held", 1, 2, Curve({2: 100}), unit=1, max_workers=2)
    pair = TaskProblem(
        "pair",
        1,
        2,
        Curve({2: 20}),
        unit=2,
        tp=2,
        faulty=True,
        alternatives=(Alternative(Shape(1, 2), Curve({2: 15})),),
    )
    problem = Problem(4, 10, 1, (pair, held), seats=((1, 2), (2, 1)))
    solution = solve(problem)
    assert (solution.workers, solution.layouts) == ((2, 2), (0, 0)), "the pair takes the node, the others the halves"
    seats = ((1, 4),)
    assert solve(replace(problem, seats=seats)).layouts == (1, 0)
    assert groups_of(problem, (2, 2), (1, 0)) == {1: 4}


def test_reshape_must_pay_off(each_kernel: str) -> None:
    """Twice as fast in the other layout: worth it only if the time until the next failure is long enough."""

    def task(reshape_us: int) -> TaskProblem:
        other = Alternative(Shape(2, 1), Curve({4: 200}))
        return TaskProblem("a", 1, 4, Curve({4: 100}), alternatives=(other,), prices=Prices(reshape_us=reshape_us))

    assert solve(Problem(4, 10, 1, (task(9),))).layouts == (1,)
    assert solve(Problem(4, 10, 1, (task(10),))).layouts == (0,), "as good: it stays"
    assert solve(Problem(4, 10, 1, (task(11),))).layouts == (0,)
    dear = solve(Problem(4, 10, 1, (task(9),)))
    assert "a 4 -> 4 in tp 2, pp 1" in dear.reason


def test_stop_costs_restart(each_kernel: str) -> None:
    """One of two must go: the one that is restarted cheaply."""
    tasks = tuple(
        TaskProblem(name, 1, 2, Curve({2: 10}), prices=Prices(restart_us=price)) for name, price in (("a", 5), ("b", 2))
    )
    assert solve(Problem(2, 10, 1, tasks)).workers == (2, 0)
    assert solve(Problem(2, 10, 1, tasks[::-1])).workers == (0, 2)


def test_endless_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last try gives, seated or not; the plan that is made of it says what finds no seat."""
    monkeypatch.setattr(seating, "TRIES_MAX", 1)
    pairs = TaskProblem("pairs", 2, 0, Curve({2: 20, 4: 40, 6: 60}), unit=2, tp=2)
    assert solve(Problem(6, 10, 1, (pairs,), seats=((3, 2),))).workers == (6,)
