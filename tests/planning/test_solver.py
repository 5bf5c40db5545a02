"""The solver against every plan there is, in both kernels."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest

from tests.planning.clusters import random_problem, with_priorities, with_turns
from tests.planning.oracle import brute_force, plain_dp, shortfall
from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning.problem import Curve, Problem, ProblemError, TaskProblem
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.planning.unlimited_integers import PRECISION, solve_exactly, solve_precisely

TEN_EACH = tuple(range(0, 100, 10))


def small_numbers(problem: Problem) -> bool:
    """Whether all gains are small multiples of 1/2, so that nothing is rounded."""
    return all(len(t.curve) == 0 or t.curve.flops.max() < 1000 for t in problem.tasks)


def test_solver_matches_brute_force(each_kernel: str) -> None:
    """The optimum, and where numbers are small the very plan, ties included."""
    exact = 0
    for seed in range(2500):
        problem = random_problem(Random(seed))
        plan, objective = brute_force(problem)
        solution = solve(problem)
        assert objective - Fraction(solution.resolution) <= solution.exact_objective <= objective, seed
        assert sum(solution.workers) <= problem.workers
        assert shortfall(problem, solution.workers) == shortfall(problem, plan), seed
        if small_numbers(problem):
            exact += 1
            assert solution.workers == plan, seed
    assert exact > 800


def test_solver_matches_plain_programme_on_medium_clusters(each_kernel: str) -> None:
    for seed in range(40):
        problem = with_priorities(Random(-seed), random_problem(Random(seed), most_tasks=10, most_workers=48))
        missed, objective = plain_dp(problem)
        solution = solve(problem)
        assert shortfall(problem, solution.workers)[:-1] == missed[:-1]
        assert objective - Fraction(solution.resolution) <= solution.exact_objective <= objective


def test_kernels_give_same_plan() -> None:
    for seed in range(60):
        problem = random_problem(Random(seed), most_tasks=12, most_workers=64)
        kernel.use("numba")
        compiled = solve(problem)
        kernel.use("numpy")
        assert solve(problem) == compiled, seed


def test_exact_solver_gives_canonical_plan() -> None:
    for seed in range(1500):
        problem = random_problem(Random(seed), most_tasks=3)
        plan, objective = brute_force(problem)
        solution = solve_exactly(problem)
        assert (solution.workers, solution.exact_objective) == (plan, objective), seed
        precise = solve_precisely(problem)
        assert objective - precise.exact_objective <= Fraction(PRECISION) * abs(objective), seed


def test_solver_handles_cancelling_terms_without_rounding() -> None:
    """Staying costs nothing, everything else nearly cancels: what remains is 1e-18 of the gains."""
    big = 10**18
    faulty = TaskProblem("a", 1, 2, Curve({1: big, 2: big, 3: big + 1}), faulty=True)
    problem = Problem(3, 1, 1, (faulty,))
    assert solve_precisely(problem).workers == (3,)
    assert solve_precisely(problem).exact_objective == 1


def test_floor_takes_precedence_over_gain(each_kernel: str) -> None:
    """Sixteen tasks and one of them is worth a million times the others: still nobody starves."""
    tasks = tuple(TaskProblem(f"t{i:02}", 10**6 if i == 7 else 1, 0, TEN_EACH, floor=1) for i in range(16))
    solution = solve(Problem(20, 10**9, 10**6, tasks))
    assert min(solution.workers) == 1 and solution.workers[7] == 5


def test_floors_that_cannot_all_be_met_are_weighed(each_kernel: str) -> None:
    tasks = tuple(TaskProblem(f"t{i}", 10**6 if i == 2 else 1, 0, TEN_EACH, floor=i + 1) for i in range(3))
    solution = solve(Problem(3, 10**9, 10**6, tasks))
    assert solution.workers == (0, 0, 3)
    assert solution.unmet_floors == ("t0", "t1")
    assert "floor unmet: t0, t1" in solution.reason
    same_weight = tuple(replace(task, weight=1) for task in tasks)
    assert solve(Problem(3, 10**9, 10**6, same_weight)).workers == (1, 2, 0), "two floors are worth as much as one"


def test_two_debug_tasks_do_not_stop_production(each_kernel: str) -> None:
    prod = TaskProblem("prod", 10, 3, TEN_EACH, floor=3)
    debug = tuple(TaskProblem(f"debug{i}", 0.01, 0, TEN_EACH, floor=1) for i in range(2))
    assert solve(Problem(3, 10**9, 10**6, (prod, *debug))).workers == (3, 0, 0)
    assert solve(Problem(4, 10**9, 10**6, (prod, *debug))).workers == (3, 1, 0)
    assert solve(Problem(2, 10**9, 10**6, (prod, *debug))).workers == (0, 1, 1), "production cannot run at all"


def test_a_large_task_does_not_starve_a_crowd_of_small_ones(each_kernel: str) -> None:
    """It would like all workers, and is worth a thousand of them; its floor is two."""
    large = TaskProblem("large", 1000, 20, TEN_EACH[:8], floor=2)
    crowd = tuple(TaskProblem(f"small{i}", 1, 0, TEN_EACH, floor=1) for i in range(5))
    assert solve(Problem(7, 10**9, 10**6, (large, *crowd))).workers == (2, 1, 1, 1, 1, 1)


def test_a_higher_priority_goes_before_any_worth(each_kernel: str) -> None:
    prod = TaskProblem("prod", 10, 3, TEN_EACH, floor=3)
    urgent = TaskProblem("urgent", 0.01, 0, TEN_EACH, floor=1, priority=1)
    assert solve(Problem(3, 10**9, 10**6, (prod, urgent))).workers[1] >= 1
    spot = replace(urgent, preemptible=True, priority=9)
    assert solve(Problem(3, 10**9, 10**6, (prod, spot))).workers == (3, 0), "a preemptible task comes after all others"


def test_a_task_that_runs_goes_before_its_equal(each_kernel: str) -> None:
    first, second = TaskProblem("first", 1, 0, TEN_EACH, floor=3), TaskProblem("second", 1, 3, TEN_EACH, floor=3)
    assert solve(Problem(3, 10**9, 10**6, (first, second))).workers == (0, 3)


def test_priorities_match_every_plan_there_is(each_kernel: str) -> None:
    exact = binding = 0
    for seed in range(1500):
        problem = with_priorities(Random(-seed), random_problem(Random(seed)))
        if seed % 2:
            problem = with_turns(Random(seed), problem)
        plan, objective = brute_force(problem)
        solution = solve(problem)
        assert shortfall(problem, solution.workers) == shortfall(problem, plan), seed
        assert objective - Fraction(solution.resolution) <= solution.exact_objective <= objective, seed
        flat = tuple(replace(task, priority=0, preemptible=False) for task in problem.tasks)
        binding += solve(replace(problem, tasks=flat)).workers != solution.workers
        if small_numbers(problem):
            exact += 1
            assert solution.workers == plan == solve_exactly(problem).workers, seed
    assert exact > 400 and binding > 50


def test_turns_take_precedence_over_floors_and_gains(each_kernel: str) -> None:
    """Against every plan there is, with floors that cannot all be met."""
    exact = binding = 0
    for seed in range(1500):
        problem = with_turns(Random(-seed), random_problem(Random(seed)))
        plan, objective = brute_force(problem)
        solution = solve(problem)
        assert shortfall(problem, solution.workers) == shortfall(problem, plan), seed
        assert objective - Fraction(solution.resolution) <= solution.exact_objective <= objective, seed
        without = solve(replace(problem, tasks=tuple(replace(task, turn=0) for task in problem.tasks)))
        binding += without.workers != solution.workers
        if small_numbers(problem):
            exact += 1
            assert solution.workers == plan == solve_exactly(problem).workers, seed
    assert exact > 400 and binding > 50


def test_highest_turn_takes_precedence_at_any_cost(each_kernel: str) -> None:
    tasks = tuple(TaskProblem(f"t{i}", 10**i, 0, TEN_EACH, floor=2, turn=turn) for i, turn in enumerate((2, 1, 0, 0)))
    assert solve(Problem(2, 10, 1, tasks)).workers == (2, 0, 0, 0)
    large = replace(tasks[0], floor=8)
    assert solve(Problem(8, 10, 1, (large, *tasks[1:]))).workers == (8, 0, 0, 0), "three others for one"
    assert solve(Problem(7, 10, 1, (large, *tasks[1:]))).workers == (0, 2, 2, 3), "it cannot be met"
    assert "in turn: t0" in solve(Problem(2, 10, 1, tasks)).reason


def test_workers_come_in_units(each_kernel: str) -> None:
    tasks = tuple(TaskProblem(f"t{i}", 1, 0, tuple(range(40)), unit=8, max_workers=17) for i in range(2))
    assert solve(Problem(39, 1, 0, tasks)).workers == (16, 16)


def test_transition_time_applies_to_its_task_only(each_kernel: str) -> None:
    """One worker has to go; the task that moves cheaply gives it."""
    dear = TaskProblem("dear", 1, 3, TEN_EACH)
    cheap = TaskProblem("cheap", 1, 3, TEN_EACH, d_transition_us=0)
    assert solve(Problem(5, 10, 1, (cheap, dear))).workers == (2, 3)
    assert solve(Problem(5, 10, 1, (dear, cheap))).workers == (3, 2)


def test_churn_term_keeps_healthy_tasks_in_place(each_kernel: str) -> None:
    """Without the term the lighter task gives a worker to the heavier one that lost its own."""
    heavy = TaskProblem("heavy", 2, 4, TEN_EACH, faulty=True)
    light = TaskProblem("light", 1, 4, TEN_EACH)
    free = Problem(7, 100, 1, (heavy, light))
    damped = Problem(7, 100, 1, (heavy, light), churn_us=1000)
    assert solve(free).workers == (7, 0)
    assert solve(damped).workers == (3, 4)
    moved = Solution(damped, (7, 0))
    assert moved.exact_objective == Solution(free, (7, 0)).exact_objective - 40 * 1000


def test_plan_reason_names_changed_tasks(each_kernel: str) -> None:
    hit = TaskProblem("hit", 1, 2, TEN_EACH, faulty=True, max_workers=4)
    calm = TaskProblem("calm", 1, 3, TEN_EACH)
    reason = solve(Problem(4, 10, 60, (calm, hit))).reason
    assert reason == "4 of 4 workers in use: hit 2 -> 1 (faulty), 1 of 2 tasks untouched"


def test_solver_handles_no_tasks_and_no_workers(each_kernel: str) -> None:
    assert solve(Problem(5, 1, 1, ())).workers == ()
    task = TaskProblem("a", 1, 3, TEN_EACH, floor=2)
    assert solve(Problem(0, 1, 1, (task,))).workers == (0,)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TaskProblem("a", -1, 0, ()), "task a: weight is -1"),
        (lambda: TaskProblem("a", float("nan"), 0, ()), "task a: weight is nan"),
        (lambda: TaskProblem("a", 1, -2, ()), "task a: workers is -2"),
        (lambda: TaskProblem("a", 1, 0, (), unit=0), "task a: unit is 0"),
        (lambda: TaskProblem("a", 1, 0, (), d_transition_us=-1), "task a: d_transition_us is -1"),
        (lambda: Curve({-1: 5}), "throughput: -1 workers"),
        (lambda: Curve({1: float("inf")}), "throughput at 1 workers is inf"),
        (lambda: Problem(-1, 1, 1, ()), "workers is -1"),
        (lambda: Problem(1, float("inf"), 1, ()), "d_running_us is inf"),
        (lambda: Problem(1, 1, 1, (TaskProblem("a", 1, 0, ()),) * 2), "tasks: a appears twice"),
        (lambda: solve(Problem(1, 1e300, 1, (TaskProblem("a", 1, 0, (0, 1e300)),))), "beyond 1e270"),
        (lambda: solve(Problem(10**12, 1, 1, (TaskProblem("a", 1, 0, Curve({10**12: 1})),))), "more than 4 GiB"),
    ],
)
def test_problem_refuses_invalid_input(make: object, said: str) -> None:
    assert callable(make)
    with pytest.raises(ProblemError, match=said):
        make()


def test_curves_compare_by_content() -> None:
    assert Curve({2: 7, 1: 5}) == Curve({1: 5, 2: 7})
    assert Curve({1: 2**60 + 1}) != Curve({1: 2**60})
    assert Curve({1: 2**60 + 1})(1) == 2**60 + 1
    assert Curve({8: 5})(7) == 0
