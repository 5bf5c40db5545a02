"""The problem as flat arrays, for the kernels.

A task's choices are points (workers, in grains) with integer values held in float64, all tasks one after
the other: task i owns `workers[starts[i]:starts[i + 1]]`, rising. Every function here is a pure function
of its arguments; equal problems give equal bits.

The grain is the greatest common divisor of the tasks' units: a cluster whose tasks all come in multiples
of 8 is solved on rows that are 8 times shorter, without any loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import frexp, fsum, gcd
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning.problem import Curve, Problem, ProblemError, TaskProblem

T = TypeVar("T")
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: No cap: more than any cluster has.
UNCAPPED = 2**62

# How a task takes part.
HEALTHY, FAULTY, ABSENT = 0, 1, 2


@dataclass(frozen=True)
class Outline:
    """Tasks as arrays, before any number of workers is fixed. Index = the task's place in the canonical order."""

    names: tuple[str, ...]
    workers: Ints  # the points of the curves that may be useful, one task's after the other's
    flops: Floats  # T in the present layout, 0 where it is none
    alt_flops: Floats  # T in the best of the other layouts
    starts: Ints
    weight: Floats
    minimum: Ints
    cap: Ints
    unit: Ints
    present: Ints  # x, before the event
    present_flops: Floats  # T(t, x), whether useful or not
    staying: list[float]  # F(t, x) * (D_move + D_churn)
    prices: Floats  # (tasks, 4): F(t, x) * what a reshape, healthy and faulty, and a stop, likewise, cost beyond a move
    grain: int

    @cached_property
    def staying_array(self) -> Floats:
        """Return `staying`, as the kernel takes it."""
        return np.array(self.staying, dtype=np.float64)

    @cached_property
    def staying_total(self) -> float:
        """Return the upper bound of what staying and prices make as a difference, for all tasks together."""
        return fsum(self.swing)

    @cached_property
    def swing(self) -> list[float]:
        """Return per task by how much prices can set two of its choices apart."""
        return [
            stay + sum(map(abs, task_prices))
            for stay, task_prices in zip(self.staying, self.prices.tolist(), strict=True)
        ]

    @cached_property
    def highest(self) -> Floats:
        """Return T in the best layout, whatever the change to it costs."""
        return np.maximum(self.flops, self.alt_flops)


@dataclass(frozen=True)
class Bounds:
    """Per task, at some n' and D_running: the highest gain, the gain at 0 workers, the steepest rise from there."""

    workers: int
    highest: list[float]
    at_zero: list[float]
    steepest: list[float]

    @cached_property
    def totals(self) -> tuple[float, float, float]:
        """Return the sums of the first two, and the largest of the last."""
        return fsum(self.highest), fsum(self.at_zero), max(self.steepest, default=0.0)


class Scale(NamedTuple):
    """How gains become integers: times 2**-exponent."""

    exponent: int

    def resolution(self, tasks: int) -> float:
        """Return how far a plan of that many tasks can be below the true optimum, in the unit of the objective.

        Half a quantum per task for the best plan and for ours, and the roundings of the gains themselves, a few 2**-53
        of a total that is below 2**52 quanta.
        """
        return 2.0**self.exponent * (tasks + 4)


@dataclass(frozen=True)
class Points:
    """The useful choices of all tasks. `stay`: the present point in grains, -1 where it is impossible."""

    workers: Ints
    values: Floats
    starts: Ints
    stay: Ints

    def leading(self, reference: Points) -> int:
        """Count the tasks from the first on that have the same choices in both."""
        count = min(len(self.stay), len(reference.stay))
        tasks_alike = min(
            _common_prefix(self.stay, reference.stay), _common_prefix(self.starts[1:], reference.starts[1:])
        )
        points_alike = min(
            _common_prefix(self.workers, reference.workers), _common_prefix(self.values, reference.values)
        )
        return min(count, tasks_alike, int(np.searchsorted(self.starts[1:], points_alike, side="right")))

    def trailing(self, reference: Points) -> int:
        """Count the tasks from the last back that have the same choices in both."""
        return self._reversed().leading(reference._reversed())

    def places(self, plan: Ints) -> list[int]:
        """Return where in `workers` the choices of a plan are, given in grains per task."""
        spans = zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), plan.tolist(), strict=True)
        return [begin + int(np.searchsorted(self.workers[begin:end], at)) for begin, end, at in spans]

    def _reversed(self) -> Points:
        return Points(self.workers[::-1], self.values[::-1], self.starts[-1] - self.starts[::-1], self.stay[::-1])


def beside_residents(points: Points, grain: int, problem: Problem) -> tuple[Points, Ints, int]:
    """Return the points by the open seats that they need, no more than there are; the workers of each; and the seats in
    one grain. `grain`: the workers in a grain of `points`.

    Of a task's choices that need no seat only the best is left: the present one if it is as good as any, else the one
    with the fewest workers. Among the others more workers need more seats, so that ties are decided as before.
    """
    counts, starts = points.workers * grain, points.starts
    seats, is_left = counts.copy(), np.ones(len(counts), dtype=np.bool_)
    stay = np.where(points.stay < 0, -1, points.stay * grain)
    for i, task in enumerate(problem.tasks):
        if not task.residents:
            continue
        span = slice(starts[i], starts[i + 1])
        seats[span] = [task.open_seats(count) for count in counts[span].tolist()]
        is_free = seats[span] == 0
        if is_free.any():
            values = np.where(is_free, points.values[span], -np.inf)
            best = np.flatnonzero(values == values.max())
            is_left[span] = ~is_free
            is_left[starts[i] + best[np.argmax(counts[span][best] == stay[i])]] = True
        if stay[i] >= 0:
            stay[i] = task.open_seats(int(stay[i]))
    is_left &= seats <= problem.open_workers
    seat_grain = gcd(grain, *(count for task in problem.tasks for count in task.residents))
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(is_left)])[starts]
    stay = np.where(stay < 0, -1, stay // seat_grain)
    return Points(seats[is_left] // seat_grain, points.values[is_left], ends, stay), counts[is_left], seat_grain


def _common_prefix(first: NDArray[np.generic], second: NDArray[np.generic]) -> int:
    """Return the length of the common beginning."""
    common = min(len(first), len(second))
    differ = first[:common] != second[:common]
    return int(np.argmax(differ)) if differ.any() else common


def outline(tasks: Sequence[TaskProblem], d_transition: float, d_churn: float) -> Outline:
    """Return the tasks as flat arrays; `d_transition` holds where a task has none of its own."""
    curves = [_curves(task) for task in tasks]
    starts = np.zeros(len(tasks) + 1, dtype=np.int64)
    np.cumsum([len(workers) for workers, _, _ in curves], out=starts[1:])
    staying, present_flops, prices = [], [], []
    for task in tasks:
        achieved = float(task.curve(task.workers)) if task.workers >= task.min_workers else 0.0
        present_waf = float(task.weight) * achieved
        transition = d_transition if task.d_transition_us is None else float(task.d_transition_us)
        move, reshape, stop = map(float, task.prices.over(transition))
        staying.append(present_waf * (move + d_churn))
        differ = (reshape - move, reshape - transition, stop - move, stop - transition)
        prices.append([present_waf * more for more in differ])
        present_flops.append(achieved if task.may_stay(task.workers) else 0.0)
    caps = [max((UNCAPPED if most is None else most for most in _caps(task)), default=0) for task in tasks]
    units = [gcd(task.unit, *(option.shape.workers for option in task.alternatives)) for task in tasks]
    return Outline(
        names=tuple(task.name for task in tasks),
        workers=np.concatenate([np.zeros(0, dtype=np.int64), *(workers for workers, _, _ in curves)]),
        flops=np.concatenate([np.zeros(0), *(flops for _, flops, _ in curves)]),
        alt_flops=np.concatenate([np.zeros(0), *(alt_flops for _, _, alt_flops in curves)]),
        starts=starts,
        weight=np.array([float(task.weight) for task in tasks], dtype=np.float64),
        minimum=np.array([task.min_workers for task in tasks], dtype=np.int64),
        cap=np.array(caps, dtype=np.int64),
        unit=np.array(units, dtype=np.int64),
        present=np.array([t.workers if t.may_have(t.workers) else UNCAPPED + 1 for t in tasks], dtype=np.int64),
        present_flops=np.array(present_flops, dtype=np.float64),
        staying=staying,
        prices=np.array(prices, dtype=np.float64).reshape(len(tasks), 4),
        grain=gcd(*units) or 1,
    )


def _caps(task: TaskProblem) -> list[int | None]:
    return [task.max_workers, *(option.most for option in task.alternatives)]


def _curves(task: TaskProblem) -> tuple[Ints, Floats, Floats]:
    """Return the points that may be useful: workers, T in the present layout, T in the best of the alternatives."""
    floor = task.floor_point
    if not task.alternatives:
        workers, flops = _points_of_layout(task.curve, task.min_workers, task.unit, floor)
        return workers, flops, np.zeros(len(workers))
    alternatives = tuple((option.curve, option.shape.workers, option.most) for option in task.alternatives)
    return _points_of_layouts(
        task.curve, task.unit, task.max_workers, alternatives, task.min_workers, floor, task.workers
    )


@lru_cache(maxsize=4096)
def _points_of_layouts(
    curve: Curve,
    unit: int,
    most: int | None,
    alternatives: tuple[tuple[Curve, int, int | None], ...],
    minimum: int,
    floor: int,
    present: int,
) -> tuple[Ints, Floats, Floats]:
    """Return the points of several layouts (see `_points_of_layout`) that are not dominated in the present one, or not
    in the alternatives; and the present number of workers, which ties need."""
    legal = [_legal(curve, unit, most, minimum), *(_legal(*option, max(minimum, 1)) for option in alternatives)]
    workers = np.unique(np.concatenate([at for at, _ in legal]))
    flops, alt_flops = np.zeros(len(workers)), np.zeros(len(workers))
    for n, (at, achieved) in enumerate(legal):
        into, where = alt_flops if n else flops, np.searchsorted(workers, at)
        into[where] = np.maximum(into[where], achieved)
    behind = int(np.searchsorted(workers, floor))
    good = workers == present
    for values in (flops, alt_flops):
        good |= np.concatenate([_rises(values[:behind]), _rises(values[behind:])])
    return workers[good], flops[good], alt_flops[good]


def _legal(curve: Curve, unit: int, most: int | None, minimum: int) -> tuple[Ints, Floats]:
    fits = (curve.workers >= minimum) & (curve.workers % unit == 0)
    if most is not None:
        fits &= curve.workers <= most
    return curve.workers[fits], curve.flops[fits]


@lru_cache(maxsize=4096)
def _points_of_layout(curve: Curve, minimum: int, unit: int, floor: int) -> tuple[Ints, Floats]:
    """Return the legal points that are not dominated by fewer workers, or by fewer that still meet the floor."""
    legal = (curve.workers >= minimum) & (curve.workers % unit == 0)
    workers, flops = curve.workers[legal], curve.flops[legal]
    behind = int(np.searchsorted(workers, floor))
    good = np.concatenate([_rises(flops[:behind]), _rises(flops[behind:])])
    return workers[good], flops[good]


def _rises(flops: Floats) -> NDArray[np.bool_]:
    """Return a mask of the numbers that are larger than all before them."""
    before = np.concatenate([[-np.inf], np.maximum.accumulate(flops)])[: len(flops)]
    rises: NDArray[np.bool_] = flops > before
    return rises


def outline_of(problem: Problem) -> Outline:
    """Return the outline of a whole problem."""
    return outline(problem.tasks, float(problem.d_transition_us), float(problem.churn_us))


def bounds(tasks: Outline, workers: int, d_running: float) -> Bounds:
    """Compute what each task can gain on at most `workers` workers."""
    with np.errstate(over="ignore", invalid="ignore"):  # `scale` refuses what overflows
        parts = kernel.active().bounds(
            tasks.workers, tasks.highest, tasks.starts, tasks.weight, tasks.minimum, tasks.cap, tasks.unit, workers
        )
        return Bounds(workers, *((part * d_running).tolist() for part in parts))


def scale(tasks: Outline, limits: Bounds, absent: Sequence[int] = ()) -> Scale:
    """Return the scale for all tasks but those `absent` (indices). It does not depend on which are faulty.

    All gains together stay below 2**52 quanta. Raise ProblemError if the gains are beyond float64.
    """
    below = _estimated_exponent(tasks, limits, absent)
    if below is None:
        below = _exponent(tasks, limits, absent)
    return Scale(max(below - 52, -900))


def _exponent(tasks: Outline, limits: Bounds, absent: Sequence[int]) -> int:
    """Return the power of two that all gains together stay below; sums are rounded once, in no order."""
    at_most, flat = fsum(without(limits.highest, absent)), fsum(without(limits.at_zero, absent))
    slope = max(without(limits.steepest, absent), default=0.0)
    bound = min(at_most, flat + slope * limits.workers) + fsum(without(tasks.swing, absent))
    if not bound < 2.0**900:
        raise ProblemError("tasks: weight * throughput * duration is beyond 1e270; give them in larger units")
    return frexp(bound)[1] if bound > 0 else -(2**20)


def _estimated_exponent(tasks: Outline, limits: Bounds, absent: Sequence[int]) -> int | None:
    """Return the same from the totals, quickly, since a table needs it for every task that may end; None where the
    totals are too near a power of two."""
    at_most, flat, slope = limits.totals
    staying, is_steepest = tasks.staying_total, False
    error = (at_most + flat + slope * limits.workers + staying) * 2.0**-40
    for i in absent:
        at_most, flat, staying = at_most - limits.highest[i], flat - limits.at_zero[i], staying - tasks.swing[i]
        is_steepest = is_steepest or limits.steepest[i] == slope
    if is_steepest:
        slope = max(without(limits.steepest, absent), default=0.0)
    bound = min(at_most, flat + slope * limits.workers) + staying
    low, high = bound - error, bound + error
    if not 0 < low <= high < 2.0**900 or frexp(low)[1] != frexp(high)[1]:
        return None
    return frexp(low)[1]


def without(values: Sequence[T], absent: Sequence[int]) -> Sequence[T]:
    """Return the values but those at the indices `absent`."""
    if not absent:
        return values
    rest = list(values)
    for index in sorted(absent, reverse=True):
        del rest[index]
    return rest


def useful(tasks: Outline, forms: Ints, floors: Sequence[int], workers: int, d_running: float, by: Scale) -> Points:
    """Return every task's useful points at n' = `workers`. `forms`: HEALTHY, FAULTY or ABSENT per task; `floors`: the
    workers that it has at least, 0 = none."""
    return Points(
        *kernel.active().useful(
            tasks.workers,
            tasks.flops,
            tasks.alt_flops,
            tasks.prices,
            tasks.starts,
            tasks.weight,
            tasks.minimum,
            tasks.cap,
            tasks.unit,
            tasks.present,
            tasks.present_flops,
            np.array(floors, dtype=np.int64),
            tasks.staying_array,
            forms,
            workers,
            d_running,
            2.0**-by.exponent,
            tasks.grain,
        )
    )
