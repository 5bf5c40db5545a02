"""The kernel in plain numpy: the reference, which computes until the compiled one is warm.

Rows
----
A *prefix* row P_i(u) is the best of the first i tasks with *exactly* u workers, -inf where there is none;
a *suffix* row S_i(j) the best of the tasks i.. with *at most* j. Exactness on the left lets a plan be read
back without guessing where slack lies; "at most" on the right is where the slack is.

An answer to a scenario (some tasks take other choices than the rows assume) is
`max_u C(u) + S(n - u)`, C being the prefix row continued through the last changed task. It is read back
in two steps: from C to the left, all numbers of workers that any optimal plan passes through; then from
the left, at each task the first choice in the order of ties that stays among them. Right of the changes
the suffix rows tell whether a choice is still optimal.

Every function of this module has a twin of the same name in `kernel_numba.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ABSENT = 2


def bounds(
    workers: Ints,
    flops: Floats,
    starts: Ints,
    weight: Floats,
    minimum: Ints,
    cap: Ints,
    unit: Ints,
    limit: int,
) -> tuple[Floats, Floats, Floats]:
    """Return per task the highest F on at most `limit` workers, F(0), and max (F(k) - F(0)) / k."""
    count = len(weight)
    highest, at_zero, steepest = np.zeros(count), np.zeros(count), np.zeros(count)
    for i in range(count):
        counts = workers[starts[i] : starts[i + 1]]
        legal = (counts <= limit) & (counts <= cap[i]) & (counts >= minimum[i]) & (counts % unit[i] == 0)
        counts, waf = counts[legal], flops[starts[i] : starts[i + 1]][legal] * weight[i]
        if len(counts) == 0:
            continue
        highest[i] = max(0.0, waf.max())
        if counts[0] == 0:
            at_zero[i] = waf[0]
        above = counts > 0
        if above.any():
            steepest[i] = max(0.0, ((waf[above] - at_zero[i]) / counts[above]).max())
    return highest, at_zero, steepest


def useful(
    workers: Ints,
    flops: Floats,
    alt_flops: Floats,
    prices: Floats,
    starts: Ints,
    weight: Floats,
    minimum: Ints,
    cap: Ints,
    unit: Ints,
    present: Ints,
    present_flops: Floats,
    floor: Ints,
    staying: Floats,
    forms: Ints,
    limit: int,
    d_running: float,
    inverse_quantum: float,
    grain: int,
) -> tuple[Ints, Floats, Ints, Ints]:
    """Return the useful points and values, flat, with starts and the present point per task: see `points.Points`.

    The value of a choice is its gain beyond a task that moves: the present layout F D_running, another layout `prices`
    less, to achieve nothing `prices` less than nothing, to stay `staying` more. Choices below `floor` are none.
    """
    count = len(weight)
    points, values, stay = [], [], np.full(count, -1, dtype=np.int64)
    for i in range(count):
        if forms[i] == _ABSENT:
            counts, value, stay_point = np.zeros(1, dtype=np.int64), np.zeros(1), 0
        else:
            of_curve = slice(starts[i], starts[i + 1])
            bonus = float(staying[i]) if forms[i] == 0 else 0.0
            at_present = float(present_flops[i] * weight[i] * d_running) + bonus if present_flops[i] > 0 else -np.inf
            scaling = (float(weight[i]), at_present, d_running, inverse_quantum)
            limits = (int(minimum[i]), int(min(cap[i], limit)), int(unit[i]), int(present[i]), int(floor[i]))
            prices_beyond = (float(prices[i, forms[i]]), float(prices[i, 2 + forms[i]]))
            counts, value, stay_point = _choices(
                workers[of_curve], flops[of_curve], alt_flops[of_curve], prices_beyond, scaling, limits
            )
        points.append(counts // grain)
        values.append(value)
        stay[i] = stay_point // grain if stay_point >= 0 else -1
    ends = np.zeros(count + 1, dtype=np.int64)
    np.cumsum([len(counts) for counts in points], out=ends[1:])
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *points]), np.concatenate([np.zeros(0), *values]), ends, stay


def _choices(
    workers: Ints,
    flops: Floats,
    alt_flops: Floats,
    prices_beyond: tuple[float, float],
    scaling: tuple[float, float, float, float],
    limits: tuple[int, int, int, int, int],
) -> tuple[Ints, Floats, int]:
    weight, at_present, d_running, inverse_quantum = scaling
    minimum, most, unit, present, floor = limits
    reshape, stop = prices_beyond
    legal = (workers <= most) & (workers >= minimum) & (workers % unit == 0)
    points, flops, alt_flops = workers[legal], flops[legal], alt_flops[legal]
    gains = np.where(flops > 0, flops * weight * d_running, -np.inf)
    gains = np.maximum(gains, np.where(alt_flops > 0, alt_flops * weight * d_running - reshape, -np.inf))
    stays = present <= most and present % unit == 0
    extra_points = {0, floor, present} if stays else {0, floor}
    missing = np.array(sorted(k for k in extra_points if k <= most and k not in points), dtype=np.int64)
    points = np.concatenate([points, missing])
    gains = np.concatenate([gains, np.full(len(missing), -np.inf)])
    order = np.argsort(points)
    points, gains = points[order], gains[order]
    if stays:
        gains = np.where(points == present, np.maximum(gains, at_present), gains)
    gains = np.where(gains == -np.inf, -stop, gains)
    values = np.rint(gains * inverse_quantum)
    meets_floor = points >= floor
    points, values = points[meets_floor], values[meets_floor]
    stays = stays and present >= floor
    before = np.concatenate([[-np.inf], np.maximum.accumulate(values)])[: len(values)]
    mask = values > before
    if stays:
        mask |= points == present
    return points[mask], values[mask], present if stays else -1


def max_plus(row: Floats, points: Ints, values: Floats) -> Floats:
    """Return out[j] = max over points k <= j of row[j - k] + value; -inf where nothing fits."""
    out = np.full_like(row, -np.inf)
    for point, value in zip(points.tolist(), values.tolist(), strict=True):
        np.maximum(out[point:], row[: len(row) - point] + value, out=out[point:])
    return out


def prefix(points: Ints, values: Floats, starts: Ints, rows: Floats, last_valid: int) -> None:
    """Fill rows[last_valid + 1:] (tasks + 1, size + 1); rows[0..last_valid] are valid already (last_valid >= 0)."""
    for i in range(last_valid, len(starts) - 1):
        span = slice(starts[i], starts[i + 1])
        rows[i + 1] = max_plus(rows[i], points[span], values[span])


def suffix(points: Ints, values: Floats, starts: Ints, rows: Floats, first_valid: int) -> None:
    """Fill rows[:first_valid] (tasks + 1, size + 1); rows[first_valid..] are valid already."""
    for i in range(first_valid - 1, -1, -1):
        span = slice(starts[i], starts[i + 1])
        rows[i] = max_plus(rows[i + 1], points[span], values[span])


def read_back(points: Ints, values: Floats, starts: Ints, stay: Ints, rows: Floats) -> Ints:
    """Return the canonical plan, in grains, from a full set of suffix rows."""
    plan = np.zeros(len(starts) - 1, dtype=np.int64)
    _read_right(points, values, starts, stay, rows, 0, rows.shape[1] - 1, plan)
    return plan


def _read_right(
    points: Ints, values: Floats, starts: Ints, stay: Ints, rows: Floats, first: int, remaining: int, plan: Ints
) -> None:
    for i in range(first, len(starts) - 1):
        span = slice(starts[i], starts[i + 1])
        fits = points[span] <= remaining
        reach = points[span][fits]
        optimal = reach[values[span][fits] + rows[i + 1][remaining - reach] == rows[i][remaining]]
        plan[i] = stay[i] if stay[i] in optimal else optimal[0]
        remaining -= plan[i]


def answer(
    points: Ints,
    values: Floats,
    starts: Ints,
    stay: Ints,
    prefixes: Floats,
    suffixes: Floats,
    alt_points: Ints,
    alt_values: Floats,
    alt_starts: Ints,
    alt_stay: Ints,
    firsts: Ints,
    form_starts: Ints,
    forms: Ints,
    plans: Ints,
) -> None:
    """Solve scenarios: plans[s, i] = grains of task i.

    Scenario s changes the tasks firsts[s], firsts[s] + 1, ... to forms[form_starts[s]:form_starts[s + 1]]:
    0 as in the rows, 1 the alternate choices (`alt_...`), 2 absent. At least one task each.
    """
    size = prefixes.shape[1] - 1
    zero_points, zero_values = np.zeros(1, dtype=np.int64), np.zeros(1)

    def choices(i: int, form: int) -> tuple[Ints, Floats, int]:
        """Return the points, values and present point of the task in this form."""
        if form == _ABSENT:
            return zero_points, zero_values, 0
        if form == 1:
            span = slice(alt_starts[i], alt_starts[i + 1])
            return alt_points[span], alt_values[span], int(alt_stay[i])
        span = slice(starts[i], starts[i + 1])
        return points[span], values[span], int(stay[i])

    for s in range(len(firsts)):
        first, changed = int(firsts[s]), forms[form_starts[s] : form_starts[s + 1]]
        last = first + len(changed)
        choices_of = [choices(i, int(changed[i - first]) if i >= first else 0) for i in range(last)]
        rows = [*prefixes[: first + 1]]
        for task_points, task_values, _ in choices_of[first:]:
            rows.append(max_plus(rows[-1], task_points, task_values))
        totals = rows[last] + suffixes[last][::-1]
        states = [np.flatnonzero(totals == totals.max())]
        for i in range(last - 1, -1, -1):
            states.append(_states_before(rows[i], rows[i + 1], states[-1], *choices_of[i][:2]))
        states.reverse()
        total = 0
        for i in range(last):
            task_points, task_values, stay_point = choices_of[i]
            goals = total + task_points
            within = goals <= size
            task_points, task_values, goals = task_points[within], task_values[within], goals[within]
            is_optimal = np.isin(goals, states[i + 1]) & (rows[i][total] + task_values == rows[i + 1][goals])
            optimal = task_points[is_optimal]
            plans[s, i] = stay_point if stay_point in optimal else optimal[0]
            total += int(plans[s, i])
        _read_right(points, values, starts, stay, suffixes, last, size - total, plans[s])


def _states_before(row: Floats, after: Floats, goals: Ints, points: Ints, values: Floats) -> Ints:
    """Return the worker counts from which some choice leads optimally to one of `goals`."""
    if len(goals) * 4 < len(points):
        parts = [np.zeros(0, dtype=np.int64)]
        for goal in goals.tolist():
            fits = points <= goal
            sources = goal - points[fits]
            parts.append(sources[row[sources] + values[fits] == after[goal]])
    else:
        parts = []
        for point, value in zip(points.tolist(), values.tolist(), strict=True):
            sources = goals[goals >= point] - point
            parts.append(sources[row[sources] + value == after[sources + point]])
    return np.unique(np.concatenate(parts))
