"""The oracles: every plan there is, and the plainest dynamic programme. Neither shares code with the solver."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from unicrond.core.planning.problem import Problem, TaskProblem


def legal_counts(problem: Problem, task: TaskProblem) -> list[int]:
    cap = problem.workers if task.max_workers is None else min(task.max_workers, problem.workers)
    return list(range(0, cap + 1, task.unit))


def gain(problem: Problem, task: TaskProblem, workers: int) -> Fraction:
    """G as the paper writes it, in exact rationals."""
    curve = task.curve.points

    def waf(x: int) -> Fraction:
        return Fraction(task.weight) * Fraction(curve.get(x, 0)) if x >= task.min_workers else Fraction(0)

    d_transition = problem.d_transition_us if task.d_transition_us is None else task.d_transition_us
    value = waf(workers) * Fraction(problem.d_running_us)
    if task.faulty or workers != task.workers:
        value -= waf(task.workers) * Fraction(d_transition)
    if not task.faulty and workers != task.workers:
        value -= waf(task.workers) * Fraction(problem.churn_us)
    return value


def unmet(task: TaskProblem, workers: int) -> int:
    return int(workers < task.floor)


def brute_force(problem: Problem) -> tuple[tuple[int, ...], Fraction]:
    """The canonical optimum by looking at every plan; ties as `solver.py` orders them."""

    def plans(index: int, left: int) -> Iterator[tuple[int, ...]]:
        if index == len(problem.tasks):
            yield ()
            return
        for count in legal_counts(problem, problem.tasks[index]):
            if count <= left:
                for rest in plans(index + 1, left - count):
                    yield (count, *rest)

    gains = [{k: gain(problem, t, k) for k in legal_counts(problem, t)} for t in problem.tasks]
    best = None
    for plan in plans(0, problem.workers):
        missed = sum(unmet(t, k) for t, k in zip(problem.tasks, plan, strict=True))
        value = sum((gains[i][k] for i, k in enumerate(plan)), Fraction(0))
        taste = tuple((k != t.workers, k) for t, k in zip(problem.tasks, plan, strict=True))
        rank = (missed, -value, taste)
        if best is None or rank < best[0]:
            best = (rank, plan, value)
    assert best is not None
    return best[1], best[2]


def plain_dp(problem: Problem) -> tuple[int, Fraction]:
    """S(i, j) = max_k S(i-1, j-k) + G(t_i, k), as in the paper: (unmet floors, objective), exact."""
    row: list[tuple[int, Fraction]] = [(0, Fraction(0))] * (problem.workers + 1)
    for task in problem.tasks:
        gains = {k: gain(problem, task, k) for k in legal_counts(problem, task)}
        row = [
            max((row[j - k][0] - unmet(task, k), row[j - k][1] + g) for k, g in gains.items() if k <= j)
            for j in range(problem.workers + 1)
        ]
    return -row[-1][0], row[-1][1]
