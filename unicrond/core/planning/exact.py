"""The same problem in unlimited integers: for the rare one whose terms cancel.

`solver.solve` is exact up to its resolution, about 1e-14 of the gains. Where large gains and large
transitions cancel out, or many floors cannot be met, that may be more than 1e-12 of what remains. Then
this solves it again in Python's integers: all numbers are dyadic fractions, so multiplied by one power of
two every gain is an integer, and nothing is ever rounded. It takes some hundred times as long: for
`plan solve` and the tests, not for the failure path.
"""

from __future__ import annotations

from fractions import Fraction
from math import lcm

import numpy as np

from unicrond.core.planning.problem import Problem, TaskProblem
from unicrond.core.planning.seating import best_with_room, has_room
from unicrond.core.planning.solver import Solution, solve

#: Promised relative precision of an objective.
PRECISION = 1e-12


def solve_precisely(problem: Problem) -> Solution:
    """The canonical plan, its objective within PRECISION of the true optimum."""
    solution = solve(problem)
    if Fraction(solution.resolution) <= Fraction(PRECISION) * abs(solution.exact_objective):
        return solution
    return solve_exactly(problem)


def solve_exactly(problem: Problem) -> Solution:
    """The canonical plan in unlimited integers, of those that find seats; its resolution is 0."""
    best = _solve_sums(problem)
    return best if has_room(best) else best_with_room(best, _solve_sums)


def _solve_sums(problem: Problem) -> Solution:
    choices = [_choices(problem, task) for task in problem.tasks]
    denominator = lcm(*(gain.denominator for own in choices for gain in own.values()))
    scaled = [{k: int(gain * denominator) for k, gain in own.items()} for own in choices]
    beyond = 1 + sum(max(own.values()) - min(own.values()) for own in scaled)
    for task, own in zip(problem.tasks, scaled, strict=True):
        for count in own:
            own[count] += beyond * _floors_worth(task, len(choices)) if count >= task.floor else 0
    size = min(problem.workers, sum(max(own) for own in scaled))
    rows = [np.zeros(size + 1, dtype=object)]
    for own in reversed(scaled):
        row = rows[-1] + own[0]  # 0 workers are always a choice
        for count, gain in own.items():
            if 0 < count <= size:
                np.maximum(row[count:], rows[-1][: size + 1 - count] + gain, out=row[count:])
        rows.append(row)
    rows.reverse()
    left, plan = size, []
    for task, own, best, rest in zip(problem.tasks, scaled, rows, rows[1:], strict=False):
        optimal = [k for k, gain in own.items() if k <= left and gain + rest[left - k] == best[left]]
        plan.append(task.workers if task.workers in optimal else min(optimal))
        left -= plan[-1]
    return Solution(problem, tuple(plan))


def _floors_worth(task: TaskProblem, tasks: int) -> int:
    """What its met floor counts; that of a turn more than all that have none, or a lower one, together."""
    return (tasks + 1) * 2 ** (task.turn - 1) if task.turn else 1


def _choices(problem: Problem, task: TaskProblem) -> dict[int, Fraction]:
    """Useful counts, rising, with their gain; the present count among them if it is legal."""
    counts = {0, task.floor_point, task.workers, *task.curve.workers.tolist()}
    counts.update(*(other.curve.workers.tolist() for other in task.others))
    chosen: dict[int, Fraction] = {}
    best = (False, -(Fraction(2) ** 4096))  # below any gain of finite numbers
    for count in sorted(k for k in counts if k <= problem.workers and task.may_have(k)):
        rank = (count >= task.floor, problem.gain(task, count))
        if rank > best or count == task.workers:
            chosen[count] = rank[1]
        best = max(best, rank)
    return chosen
