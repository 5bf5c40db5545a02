"""The exact solver: a multiple-choice knapsack by dynamic programming.

The rules
---------
* *Gains become integers.* G is shifted by the constant that every choice of the task pays (its
  transition), so that a choice is worth F(t, x') * D_running, plus, for a healthy task that stays,
  F(t, x) * (D_transition + D_churn). That is divided by a power of two, the quantum, and rounded: all
  sums stay below 2**53, hence exact in float64, associative, and the same in any order of the tasks.
  The plan's objective is then below the true optimum by at most `Scale.resolution`.
* *Useful points only.* A choice with more workers and no more gain than another is never needed; the
  present number of workers always stays in, for the ties' sake.
* *Floors.* The largest number of floors that can be met at once is known beforehand (smallest first). If
  that is all of them, they are hard limits. If not, each met floor is worth more than all gains together.
* *Ties.* From the first task to the last: its present number of workers if some optimal plan has that,
  else the smallest number that some optimal plan has. This names one plan, whatever way it is computed.

    S_i(j) = max_k v_i(k) + S_{i+1}(j - k)       best of tasks i.. with at most j workers; S_{m+1} = 0

What does not live here: time (the caller measures), the one-step table (`table.py`), arrays (`points.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from unicrond.core.planning import kernel
from unicrond.core.planning.points import Points, Scale, bounds, outline_of, scale, useful
from unicrond.core.planning.problem import Problem, ProblemError, TaskProblem

#: Rows larger than this are refused rather than tried.
MOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Solution:
    """An answer: `workers` per task, in the problem's order. All else follows from the problem.

    `resolution`: the plan's objective is at most this far below the true optimum.
    """

    problem: Problem
    workers: tuple[int, ...]
    resolution: float = 0.0

    def __iter__(self) -> Iterator[tuple[TaskProblem, int]]:
        """The tasks with their workers."""
        return iter(zip(self.problem.tasks, self.workers, strict=True))

    @cached_property
    def exact_objective(self) -> Fraction:
        """sum_t G(t, x -> x'), from the problem's own numbers."""
        return sum((self.problem.gain(task, workers) for task, workers in self), Fraction(0))

    @property
    def objective(self) -> float:
        """The objective, correctly rounded: weighted FLOP/s times the unit of the durations."""
        return float(self.exact_objective)

    @cached_property
    def waf_of(self) -> tuple[int, ...]:
        """F(t, x'_t) per task, weighted FLOP/s."""
        return tuple(round(task.waf(workers)) for task, workers in self)

    @property
    def waf(self) -> int:
        """sum_t F(t, x'_t), weighted FLOP/s."""
        return sum(self.waf_of)

    @property
    def unmet_floors(self) -> tuple[str, ...]:
        """Names of the tasks that get fewer workers than their floor."""
        return tuple(task.name for task, workers in self if workers < task.floor)

    @cached_property
    def reason(self) -> str:
        """Why, in one plain sentence."""
        return explain(self)


def solve(problem: Problem) -> Solution:
    """The canonical optimal plan. Raises ProblemError if the gains are beyond float64, or the rows beyond 4 GiB."""
    points, by, grain = choices_of(problem)
    most = sum(points.workers[points.starts[1:] - 1].tolist())  # more than that brings nothing
    shape = (len(problem.tasks) + 1, min(problem.workers // grain, most) + 1)
    if shape[0] * shape[1] * 8 > MOST_BYTES:
        told = f"n' = {problem.workers} among {len(problem.tasks)} tasks takes more than 4 GiB"
        raise ProblemError(f"{told}; plan for nodes, not workers")
    rows = np.empty(shape)
    rows[-1] = 0.0
    compute = kernel.active()
    compute.suffix(points.workers, points.values, points.starts, rows, len(problem.tasks))
    plan = compute.read_back(points.workers, points.values, points.starts, points.stay, rows) * grain
    return Solution(problem, tuple(plan.tolist()), by.resolution(len(problem.tasks)))


def choices_of(problem: Problem) -> tuple[Points, Scale, int]:
    """The problem's useful points, their scale, and the workers in one grain."""
    tasks, d_running = outline_of(problem), float(problem.d_running_us)
    by = scale(tasks, bounds(tasks, problem.workers, d_running))
    forms = np.array([int(task.faulty) for task in problem.tasks], dtype=np.int64)
    return useful(tasks, forms, problem.workers, d_running, by), by, tasks.grain


#: As many changes are told one by one; a reason is a sentence, not a table.
_TOLD = 12


def explain(solution: Solution) -> str:
    """One plain sentence: which tasks change, stay or go short, and what the cluster achieves."""
    changed = [
        f"{task.name} {task.workers} -> {workers}{' (faulty)' if task.faulty else ''}"
        for task, workers in solution
        if workers != task.workers
    ]
    hit = [f"{task.name} keeps {x} (faulty)" for task, x in solution if x == task.workers and task.faulty]
    parts = [*hit, *changed]
    untouched = len(solution.workers) - len(parts)
    if len(parts) > _TOLD:
        parts = [*parts[:_TOLD], f"{len(parts) - _TOLD} more change"]
    if untouched:
        parts.append(f"{untouched} of {len(solution.workers)} tasks untouched")
    if short := solution.unmet_floors:
        more = f" and {len(short) - _TOLD} more" if len(short) > _TOLD else ""
        parts.append(f"floor unmet: {', '.join(short[:_TOLD])}{more}")
    used, left, told = sum(solution.workers), solution.problem.workers, ", ".join(parts) or "no tasks"
    return f"{used} of {left} workers in use, WAF {float(solution.waf):.4g} FLOP/s: {told}"
