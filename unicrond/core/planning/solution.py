"""The answer to a planning problem: workers per task, all that follows from them, and the reason in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil

from unicrond.core.planning.floors import problem_values
from unicrond.core.planning.problem import Problem, TaskProblem
from unicrond.events.vocabulary.shape import Shape

#: The most changes that a reason names one by one: it is a sentence, not a table.
_CHANGES_MAX = 12


@dataclass(frozen=True)
class Solution:
    """A solution: `workers` per task, in the problem's order. All else follows from the problem.

    `fixed_layouts`: the layout of each task (0: the present one, then its alternatives in their order) where that is
    not the best for so many workers, for want of seats.

    `resolution`: the plan's objective is at most this far below the true optimum. `gap`: of several pools, how much
    better another deal of the tasks may be at most, as a share of the objective; 0 where this is proven to be best, 1
    where other floors might be met.
    """

    problem: Problem
    workers: tuple[int, ...]
    resolution: float = 0.0
    fixed_layouts: tuple[int, ...] = ()
    gap: float = 0.0

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
    def gap_ppm(self) -> int:
        """Return the gap in parts per million, rounded up."""
        return ceil(self.gap * 1e6)

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
    def shortfall(self) -> int:
        """Return what is minimised before the objective: the values of the unmet floors together (floors.py)."""
        values = problem_values(self.problem)
        return sum(value for (task, workers), value in zip(self, values, strict=True) if workers < task.floor)

    @cached_property
    def reason(self) -> str:
        """Explain the plan in one plain sentence."""
        return explain(self)


def explain(solution: Solution) -> str:
    """Explain in one plain sentence which tasks change, stay or go short. What the plan is worth is for the reader's
    screen to say, in one unit (display/worth.py)."""
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
    return f"{in_use} of {total} workers in use: {changes}"


def _other_layout(task: TaskProblem, layout: int) -> str:
    if not layout:
        return ""
    shape, gpu = task.shape_of(layout), task.gpu_of(layout)
    where = f" on {gpu or 'unnamed GPUs'}" if gpu != task.gpu else ""
    return f" in {shape}{where}" if shape != task.shape else where
