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
  that is all of them, they are hard limits. If not, each met floor is worth more than all gains together, and that of
  a task that has a turn more than all floors of lower turns and of none.
* *Layouts.* What a layout costs depends on the task alone, so each number of workers takes the best of its layouts
  before tasks are weighed against each other.
* *Ties.* From the first task to the last: its present number of workers if some optimal plan has that,
  else the smallest number that some optimal plan has; its present layout if that is as good for this number, else the
  one that achieves most, the first of equals. This defines exactly one plan, however it is computed.
* *Pools.* Of several types of GPU each task gets one (`pools.py`), and each pool is planned by the rules above.
* *Seats.* A plan whose tensor-parallel groups find no room is excluded, and the next best is searched
  (`feasibility.py`).

    S_i(j) = max_k v_i(k) + S_{i+1}(j - k)       best of tasks i.. with at most j workers; S_{m+1} = 0

Not part of this module: time (the caller measures), the one-step table (`table.py`), arrays (`points.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning.feasibility import best_with_room, has_room
from unicrond.core.planning.points import Points, Scale, bounds, outline_of, scale, useful
from unicrond.core.planning.pools import best_of_pools
from unicrond.core.planning.problem import Problem, ProblemError, TaskProblem
from unicrond.events.vocabulary.shape import Shape

#: Rows larger than this are refused rather than tried.
MOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Solution:
    """A solution: `workers` per task, in the problem's order. All else follows from the problem.

    `fixed_layouts`: the layout of each task (0: the present one, then its alternatives in their order) where that is
    not the best for so many workers, for want of seats.

    `resolution`: the plan's objective is at most this far below the true optimum.
    """

    problem: Problem
    workers: tuple[int, ...]
    resolution: float = 0.0
    fixed_layouts: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[tuple[TaskProblem, int]]:
        """Iterate over the tasks with their workers."""
        return iter(zip(self.problem.tasks, self.workers, strict=True))

    @cached_property
    def layouts(self) -> tuple[int, ...]:
        """Return the layout of each task: `fixed_layouts`, or the best for so many workers."""
        return self.fixed_layouts or tuple([self.problem.layout_for(task, workers) for task, workers in self])

    @cached_property
    def exact_objective(self) -> Fraction:
        """Return sum_t G(t, x -> x'), from the problem's own numbers."""
        gains = [self.problem.gain_in(task, workers, layout) for task, workers, layout in self._choices]
        return sum(gains, Fraction(0))

    @property
    def objective(self) -> float:
        """Return the objective, correctly rounded: weighted FLOP/s times the unit of the durations."""
        return float(self.exact_objective)

    @cached_property
    def waf_of(self) -> tuple[int, ...]:
        """Return F(t, x'_t) per task, in weighted FLOP/s."""
        return tuple(round(task.waf(workers, layout)) for task, workers, layout in self._choices)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Return the shape of each task's layout."""
        return tuple(task.shape_of(layout) for task, layout in zip(self.problem.tasks, self.layouts, strict=True))

    @property
    def gpus(self) -> tuple[str, ...]:
        """Return the pool of each task."""
        return tuple(task.gpu_of(layout) for task, layout in zip(self.problem.tasks, self.layouts, strict=True))

    @property
    def _choices(self) -> Iterator[tuple[TaskProblem, int, int]]:
        return zip(self.problem.tasks, self.workers, self.layouts, strict=True)

    @property
    def waf(self) -> int:
        """Return sum_t F(t, x'_t), in weighted FLOP/s."""
        return sum(self.waf_of)

    @property
    def unmet_floors(self) -> tuple[str, ...]:
        """Return the names of the tasks that get fewer workers than their floor."""
        return tuple(task.name for task, workers in self if workers < task.floor)

    @property
    def shortfall(self) -> tuple[int, int]:
        """Return what is minimised before the objective: unmet floors of tasks that have a turn, the highest first;
        then the number of the others."""
        missed = [task for task, workers in self if workers < task.floor]
        return sum(1 << task.turn for task in missed if task.turn), sum(not task.turn for task in missed)

    @cached_property
    def reason(self) -> str:
        """Explain the plan in one plain sentence."""
        return explain(self)


def solve(problem: Problem) -> Solution:
    """Return the canonical optimal plan of those that have room; of several pools a good plan, see pools.py.

    Raise ProblemError if the gains are beyond float64, or the rows beyond 4 GiB.
    """
    if problem.pools:
        return best_of_pools(problem, solve)
    best = _solve_sums(problem)
    return best if has_room(best) else best_with_room(best, _solve_sums)


def _solve_sums(problem: Problem) -> Solution:
    """Return the canonical optimal plan without regard to seats."""
    points, by, grain = choices_of(problem)
    most = sum(points.workers[points.starts[1:] - 1].tolist())  # more than that brings nothing
    shape = (len(problem.tasks) + 1, min(problem.workers // grain, most) + 1)
    if shape[0] * shape[1] * 8 > MOST_BYTES:
        size = f"n' = {problem.workers} among {len(problem.tasks)} tasks takes more than 4 GiB"
        raise ProblemError(f"{size}; plan for nodes, not workers")
    rows = np.empty(shape)
    rows[-1] = 0.0
    compute = kernel.active()
    compute.suffix(points.workers, points.values, points.starts, rows, len(problem.tasks))
    plan = compute.read_back(points.workers, points.values, points.starts, points.stay, rows) * grain
    return Solution(problem, tuple(plan.tolist()), by.resolution(len(problem.tasks)))


def choices_of(problem: Problem) -> tuple[Points, Scale, int]:
    """Return the problem's useful points, their scale, and the workers in one grain."""
    tasks, d_running = outline_of(problem), float(problem.d_running_us)
    by = scale(tasks, bounds(tasks, problem.workers, d_running))
    forms = np.array([int(task.faulty) for task in problem.tasks], dtype=np.int64)
    return useful(tasks, forms, problem.workers, d_running, by), by, tasks.grain


#: The most changes that a reason names one by one: it is a sentence, not a table.
_CHANGES_MAX = 12


def explain(solution: Solution) -> str:
    """Explain in one plain sentence which tasks change, stay or go short, and what the cluster achieves."""
    changed = [
        f"{task.name} {task.workers} -> {workers}{_other_layout(task, layout)}{' (faulty)' if task.faulty else ''}"
        for (task, workers), layout in zip(solution, solution.layouts, strict=True)
        if workers != task.workers or layout
    ]
    hit = [
        f"{task.name} keeps {x} (faulty)"
        for (task, x), layout in zip(solution, solution.layouts, strict=True)
        if x == task.workers and task.faulty and not layout
    ]
    parts = [*hit, *changed]
    untouched = len(solution.workers) - len(parts)
    if len(parts) > _CHANGES_MAX:
        parts = [*parts[:_CHANGES_MAX], f"{len(parts) - _CHANGES_MAX} more change"]
    if untouched:
        parts.append(f"{untouched} of {len(solution.workers)} tasks untouched")
    if turns := [task.name for task, workers in solution if task.turn and workers >= task.floor]:
        parts.append(f"in turn: {', '.join(turns)}")
    if short := solution.unmet_floors:
        more = f" and {len(short) - _CHANGES_MAX} more" if len(short) > _CHANGES_MAX else ""
        parts.append(f"floor unmet: {', '.join(short[:_CHANGES_MAX])}{more}")
    in_use, total, changes = sum(solution.workers), solution.problem.workers, ", ".join(parts) or "no tasks"
    return f"{in_use} of {total} workers in use, WAF {float(solution.waf):.4g} FLOP/s: {changes}"


def _other_layout(task: TaskProblem, layout: int) -> str:
    if not layout:
        return ""
    shape, gpu = task.shape_of(layout), task.gpu_of(layout)
    where = f" on {gpu or 'unnamed GPUs'}" if gpu != task.gpu else ""
    return f" in {shape}{where}" if shape != task.shape else where
