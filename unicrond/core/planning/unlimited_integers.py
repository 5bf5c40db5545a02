"""The solver in unlimited integers, for the rare problem whose terms cancel.

`solver.solve` is exact up to its resolution, about 1e-14 of the gains. Where large gains and large
transitions cancel out, that may be more than 1e-12 of the remainder. Then
this module solves the problem again in Python's integers: all numbers are dyadic fractions, so multiplied by one
power of two every gain is an integer, and nothing is ever rounded. It takes some hundred times as long: it serves
`plan solve` and the tests, not the failure path.
"""

from __future__ import annotations

from fractions import Fraction
from math import lcm

import numpy as np

from unicrond.core.planning.feasibility import best_with_room, has_room
from unicrond.core.planning.floors import problem_floors
from unicrond.core.planning.pools import best_of_pools
from unicrond.core.planning.problem import Problem, TaskProblem
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve

#: Promised relative precision of an objective.
PRECISION = 1e-12


def solve_precisely(problem: Problem) -> Solution:
    """Return the canonical plan, its objective within PRECISION of the true optimum; of several pools, within what its
    gap says."""
    if problem.pools:
        return best_of_pools(problem, solve_precisely)
    solution = solve(problem)
    if Fraction(solution.resolution) <= Fraction(PRECISION) * abs(solution.exact_objective):
        return solution
    return solve_exactly(problem)


def solve_exactly(problem: Problem) -> Solution:
    """Return the canonical plan that has room, solved in unlimited integers; its resolution is 0."""
    best = _solve_sums(problem)
    return best if has_room(best) else best_with_room(best, _solve_sums)


def _solve_sums(problem: Problem) -> Solution:
    """Solve for the sum of open seats alone."""
    floors = zip(problem.tasks, problem_floors(problem), strict=True)
    choices = [_choices(problem, task, floor) for task, floor in floors]
    denominator = lcm(*(gain.denominator for gains in choices for gain in gains.values()))
    scaled = [{k: int(gain * denominator) for k, gain in gains.items()} for gains in choices]
    size = min(problem.open_workers, sum(max(gains) for gains in scaled))
    impossible = -1 - 2 * sum(max(map(abs, gains.values())) for gains in scaled)  # below any sum, whatever is added
    rows = [np.zeros(size + 1, dtype=object)]
    for task, gains in zip(reversed(problem.tasks), reversed(scaled), strict=True):
        row = np.full(size + 1, impossible, dtype=object)
        for count, gain in gains.items():
            if (seats := task.open_seats(count)) <= size:
                np.maximum(row[seats:], rows[-1][: size + 1 - seats] + gain, out=row[seats:])
        rows.append(row)
    rows.reverse()
    remaining, plan = size, []
    for task, gains, best, rest in zip(problem.tasks, scaled, rows, rows[1:], strict=False):
        optimal = [
            count
            for count, gain in gains.items()
            if (seats := task.open_seats(count)) <= remaining and gain + rest[remaining - seats] == best[remaining]
        ]
        plan.append(task.workers if task.workers in optimal else min(optimal))
        remaining -= task.open_seats(plan[-1])
    return Solution(problem, tuple(plan))


def _choices(problem: Problem, task: TaskProblem, floor: int) -> dict[int, Fraction]:
    """Return the useful worker counts from `floor` on, rising, with their gains; the present count is among them if it
    is legal."""
    counts = {0, floor, task.workers, *task.curve.workers.tolist()}
    counts.update(*(alternative.curve.workers.tolist() for alternative in task.alternatives))
    useful_gains: dict[int, Fraction] = {}
    best: Fraction | None = None
    for count in sorted(k for k in counts if floor <= k <= problem.workers and task.may_have(k)):
        gain = problem.gain(task, count)
        if best is None or gain > best or count == task.workers:
            useful_gains[count] = gain
        best = gain if best is None else max(best, gain)
    return useful_gains
