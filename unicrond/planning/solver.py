"""The exact solver: a multiple-choice knapsack by dynamic programming.

The rules
---------
* *Gains become integers.* G is shifted by the constant that every choice of the task pays (its
  transition), so that a choice is worth F(t, x') * D_running, plus, for a healthy task that stays,
  F(t, x) * (D_transition + D_churn). That is divided by a power of two, the quantum, and rounded: all
  sums stay below 2**53, hence exact in float64, associative, and the same in any order of the tasks.
  The plan's objective is then below the true optimum by at most (number of tasks) * quantum.
* *Useful points only.* A choice with more workers and no more gain than another is never needed; the
  present number of workers always stays in, for the ties' sake.
* *Floors.* The largest number of floors that can be met at once is known beforehand (smallest first). If
  that is all of them, they are hard limits. If not, each met floor is worth more than all gains together.
* *Ties.* From the first task to the last: its present number of workers if some optimal plan has that,
  else the smallest number that some optimal plan has. This names one plan, whatever way it is computed.

    S_i(j) = max_k v_i(k) + S_{i+1}(j - k)       best of tasks i.. with at most j workers; S_{m+1} = 0

What does not live here: time (the caller measures), the table (`table.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import frexp, fsum, gcd

import numpy as np
from numpy.typing import NDArray

from unicrond.planning.problem import Problem, ProblemError, TaskProblem

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """An answer: `workers` per task, in the problem's order. All else follows from the problem."""

    problem: Problem
    workers: tuple[int, ...]

    @cached_property
    def exact_objective(self) -> Fraction:
        """sum_t G(t, x -> x'), from the problem's own numbers."""
        pairs = zip(self.problem.tasks, self.workers, strict=True)
        return sum((self.problem.gain(task, workers) for task, workers in pairs), Fraction(0))

    @property
    def objective(self) -> float:
        """The objective, correctly rounded: weighted FLOP/s times the unit of the durations."""
        return float(self.exact_objective)

    @cached_property
    def waf_of(self) -> tuple[int, ...]:
        """F(t, x'_t) per task, weighted FLOP/s."""
        return tuple(round(t.waf(x)) for t, x in zip(self.problem.tasks, self.workers, strict=True))

    @property
    def waf(self) -> int:
        """sum_t F(t, x'_t), weighted FLOP/s."""
        return sum(self.waf_of)

    @property
    def unmet_floors(self) -> tuple[str, ...]:
        """Names of the tasks that get fewer workers than their floor."""
        pairs = zip(self.problem.tasks, self.workers, strict=True)
        return tuple(task.name for task, workers in pairs if workers < task.floor)

    @cached_property
    def reason(self) -> str:
        """Why, in one plain sentence."""
        return explain(self)


@dataclass(frozen=True)
class Scale:
    """How gains become integers: divided by 2**exponent; `floor_bonus` for a met floor, 0 = floors are hard."""

    exponent: int
    floor_bonus: float


def solve(problem: Problem) -> Solution:
    """The canonical optimal plan. Raises ProblemError if the gains are beyond float64."""
    scale = scale_of(problem)
    grain = gcd(*(task.unit for task in problem.tasks)) or 1
    size = problem.workers // grain
    choices = [_choices(problem, task, scale, grain) for task in problem.tasks]
    rows = [np.zeros(size + 1)]
    for points, values, _ in reversed(choices):
        rows.append(max_plus(rows[-1], points, values))
    rows.reverse()
    left, plan = size, []
    for (points, values, stay), best, rest in zip(choices, rows, rows[1:], strict=False):
        fits = points <= left
        optimal = points[fits][values[fits] + rest[left - points[fits]] == best[left]]
        taken = stay if stay in optimal else int(optimal[0])
        plan.append(taken * grain)
        left -= taken
    return Solution(problem, tuple(plan))


def max_plus(row: Row, points: NDArray[np.int64], values: Row) -> Row:
    """out[j] = max over points k <= j of row[j - k] + value; -inf where nothing fits."""
    out = np.full_like(row, -np.inf)
    for point, value in zip(points.tolist(), values.tolist(), strict=True):
        np.maximum(out[point:], row[: len(row) - point] + value, out=out[point:])
    return out


def scale_of(problem: Problem) -> Scale:
    """The quantum and the worth of a floor: a function of the problem that forgets who is faulty."""
    bound = _upper_bound(problem)
    floors = sorted(task.floor_point for task in problem.tasks if task.floor_point)
    met, left = 0, problem.workers
    for point in floors:
        if point > left:
            break
        met, left = met + 1, left - point
    bits = 52 if met == len(floors) else 51 - met.bit_length()
    exponent = frexp(bound)[1] - bits if bound > 0 else 0
    return Scale(exponent, 0.0 if met == len(floors) else 2.0 ** (bits + 1))


def _upper_bound(problem: Problem) -> float:
    """At least the sum of the shifted gains of any plan, faults forgotten."""
    highest, base, steepest, bonuses = [], [], 0.0, []
    for task in problem.tasks:
        points, gains, bonus = _gains(problem, task)
        none = float(gains[0]) if points[0] == 0 else 0.0
        above = points > 0
        highest.append(float(gains.max()) + bonus)
        base.append(none)
        bonuses.append(bonus)
        if above.any():
            steepest = max(steepest, float(((gains[above] - none) / points[above]).max()))
    bound = min(fsum(highest), fsum(base) + steepest * problem.workers + fsum(bonuses))
    if not bound < 2.0**1000:
        raise ProblemError("tasks: weight * throughput * duration is beyond 1e300; give them in larger units")
    return bound


def _gains(problem: Problem, task: TaskProblem) -> tuple[NDArray[np.int64], Row, float]:
    """Legal points, their F * D_running, and what staying is worth on top."""
    points = task.curve.workers
    legal = (points <= problem.workers) & (points % task.unit == 0) & (points >= task.min_workers)
    if task.max_workers is not None:
        legal &= points <= task.max_workers
    points, flops = points[legal], task.curve.flops[legal]
    extra = {0, task.floor_point}
    if task.may_have(task.workers):
        extra.add(task.workers)
    missing = np.array(sorted(k for k in extra if k <= problem.workers and k not in points), dtype=np.int64)
    points = np.concatenate([points, missing])
    flops = np.concatenate([flops, np.zeros(len(missing))])
    order = np.argsort(points, kind="stable")
    waf = float(task.waf(task.workers))
    bonus = waf * (float(problem.transition_of(task)) + float(problem.churn_us))
    return points[order], flops[order] * float(task.weight) * float(problem.d_running_us), bonus


def _choices(
    problem: Problem, task: TaskProblem, scale: Scale, grain: int
) -> tuple[NDArray[np.int64], Row, int]:
    """Useful points (in grains, rising), their integer values, and the present point (-1: not possible)."""
    points, gains, bonus = _gains(problem, task)
    stay = task.workers if task.may_have(task.workers) and task.workers <= problem.workers else -1
    if not task.faulty:
        gains = gains + np.where(points == stay, bonus, 0.0)
    values = np.rint(np.ldexp(gains, -scale.exponent))
    if scale.floor_bonus:
        values += np.where((points >= task.floor_point) & (task.floor_point > 0), scale.floor_bonus, 0.0)
    else:
        legal = points >= task.floor_point
        points, values = points[legal], values[legal]
    best_before = np.concatenate([[-np.inf], np.maximum.accumulate(values)[:-1]])
    useful = (values > best_before) | (points == stay)
    points, values = points[useful], values[useful]
    return points // grain, values, stay // grain if stay in points else -1


def explain(solution: Solution) -> str:
    """One plain sentence: who changes, who stays, who goes short, what the cluster achieves."""
    problem, pairs = solution.problem, list(zip(solution.problem.tasks, solution.workers, strict=True))
    changed = [
        f"{task.name} {task.workers} -> {workers}{' (faulty)' if task.faulty else ''}"
        for task, workers in pairs
        if workers != task.workers
    ]
    same = [(task, workers) for task, workers in pairs if workers == task.workers]
    repaired = [f"{task.name} keeps {workers} (faulty)" for task, workers in same if task.faulty]
    parts = [*changed, *repaired]
    if len(same) > len(repaired):
        parts.append(f"{len(same) - len(repaired)} of {len(pairs)} tasks untouched")
    if solution.unmet_floors:
        parts.append(f"floor unmet: {', '.join(solution.unmet_floors)}")
    used, told = sum(solution.workers), ", ".join(parts) or "no tasks"
    return f"{used} of {problem.workers} workers in use, WAF {solution.waf:.4g} FLOP/s: {told}"
