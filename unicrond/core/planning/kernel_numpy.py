"""The kernel in plain numpy: the reference, and what computes until the compiled one is warm.

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
    """Per task: the highest F on at most `limit` workers, F(0), and max (F(k) - F(0)) / k."""
    count = len(weight)
    highest, at_zero, steepest = np.zeros(count), np.zeros(count), np.zeros(count)
    for i in range(count):
        own = workers[starts[i] : starts[i + 1]]
        legal = (own <= limit) & (own <= cap[i]) & (own >= minimum[i]) & (own % unit[i] == 0)
        own, waf = own[legal], flops[starts[i] : starts[i + 1]][legal] * weight[i]
        if len(own) == 0:
            continue
        highest[i] = max(0.0, waf.max())
        if own[0] == 0:
            at_zero[i] = waf[0]
        above = own > 0
        if above.any():
            steepest[i] = max(0.0, ((waf[above] - at_zero[i]) / own[above]).max())
    return highest, at_zero, steepest


def useful(
    workers: Ints,
    flops: Floats,
    other: Floats,
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
    floor_bonus: Floats,
    grain: int,
) -> tuple[Ints, Floats, Ints, Ints]:
    """Useful points and values, flat, with starts and the present point per task: see `points.Points`.

    A choice is worth what it gains beyond a task that moves: the present layout F D_running, another `prices` less, to
    achieve nothing `prices` less than nothing, to stay `staying` more.
    """
    count = len(weight)
    points, values, stay = [], [], np.full(count, -1, dtype=np.int64)
    for i in range(count):
        if forms[i] == _ABSENT:
            own, value, here = np.zeros(1, dtype=np.int64), np.zeros(1), 0
        else:
            of_curve = slice(starts[i], starts[i + 1])
            bonus = float(staying[i]) if forms[i] == 0 else 0.0
            at_present = float(present_flops[i] * weight[i] * d_running) + bonus if present_flops[i] > 0 else -np.inf
            by = (float(weight[i]), at_present, d_running, inverse_quantum, float(floor_bonus[i]))
            limits = (int(minimum[i]), int(min(cap[i], limit)), int(unit[i]), int(present[i]), int(floor[i]))
            dear = (float(prices[i, forms[i]]), float(prices[i, 2 + forms[i]]))
            own, value, here = _choices(workers[of_curve], flops[of_curve], other[of_curve], dear, by, limits)
        points.append(own // grain)
        values.append(value)
        stay[i] = here // grain if here >= 0 else -1
    ends = np.zeros(count + 1, dtype=np.int64)
    np.cumsum([len(own) for own in points], out=ends[1:])
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *points]), np.concatenate([np.zeros(0), *values]), ends, stay


def _choices(
    workers: Ints,
    flops: Floats,
    other: Floats,
    dear: tuple[float, float],
    by: tuple[float, float, float, float, float],
    limits: tuple[int, int, int, int, int],
) -> tuple[Ints, Floats, int]:
    weight, at_present, d_running, inverse_quantum, floor_bonus = by
    minimum, most, unit, present, floor = limits
    reshape, stop = dear
    legal = (workers <= most) & (workers >= minimum) & (workers % unit == 0)
    points, flops, other = workers[legal], flops[legal], other[legal]
    gains = np.where(flops > 0, flops * weight * d_running, -np.inf)
    gains = np.maximum(gains, np.where(other > 0, other * weight * d_running - reshape, -np.inf))
    stays = present <= most and present % unit == 0
    wanted = {0, floor, present} if stays else {0, floor}
    missing = np.array(sorted(k for k in wanted if k <= most and k not in points), dtype=np.int64)
    points = np.concatenate([points, missing])
    gains = np.concatenate([gains, np.full(len(missing), -np.inf)])
    order = np.argsort(points)
    points, gains = points[order], gains[order]
    if stays:
        gains = np.where(points == present, np.maximum(gains, at_present), gains)
    gains = np.where(gains == -np.inf, -stop, gains)
    values = np.rint(gains * inverse_quantum)
    if floor_bonus > 0:
        if floor > 0:
            values = np.where(points >= floor, values + floor_bonus, values)
    else:
        met = points >= floor
        points, values = points[met], values[met]
        stays = stays and present >= floor
    before = np.concatenate([[-np.inf], np.maximum.accumulate(values)])[: len(values)]
    kept = values > before
    if stays:
        kept |= points == present
    return points[kept], values[kept], present if stays else -1


def max_plus(row: Floats, points: Ints, values: Floats) -> Floats:
    """out[j] = max over points k <= j of row[j - k] + value; -inf where nothing fits."""
    out = np.full_like(row, -np.inf)
    for point, value in zip(points.tolist(), values.tolist(), strict=True):
        np.maximum(out[point:], row[: len(row) - point] + value, out=out[point:])
    return out


def prefix(points: Ints, values: Floats, starts: Ints, rows: Floats, known: int) -> None:
    """Fill rows[known + 1:] (tasks + 1, size + 1); rows[0..known] stand already (known >= 0)."""
    for i in range(known, len(starts) - 1):
        own = slice(starts[i], starts[i + 1])
        rows[i + 1] = max_plus(rows[i], points[own], values[own])


def suffix(points: Ints, values: Floats, starts: Ints, rows: Floats, known: int) -> None:
    """Fill rows[:known] (tasks + 1, size + 1); rows[known..] stand already."""
    for i in range(known - 1, -1, -1):
        own = slice(starts[i], starts[i + 1])
        rows[i] = max_plus(rows[i + 1], points[own], values[own])


def read_back(points: Ints, values: Floats, starts: Ints, stay: Ints, rows: Floats) -> Ints:
    """The canonical plan, in grains, from a full set of suffix rows."""
    plan = np.zeros(len(starts) - 1, dtype=np.int64)
    _read_right(points, values, starts, stay, rows, 0, rows.shape[1] - 1, plan)
    return plan


def _read_right(
    points: Ints, values: Floats, starts: Ints, stay: Ints, rows: Floats, first: int, left: int, plan: Ints
) -> None:
    for i in range(first, len(starts) - 1):
        own = slice(starts[i], starts[i + 1])
        fits = points[own] <= left
        reach = points[own][fits]
        optimal = reach[values[own][fits] + rows[i + 1][left - reach] == rows[i][left]]
        plan[i] = stay[i] if stay[i] in optimal else optimal[0]
        left -= plan[i]


def answer(
    points: Ints,
    values: Floats,
    starts: Ints,
    stay: Ints,
    prefixes: Floats,
    suffixes: Floats,
    other_points: Ints,
    other_values: Floats,
    other_starts: Ints,
    other_stay: Ints,
    firsts: Ints,
    form_starts: Ints,
    forms: Ints,
    plans: Ints,
) -> None:
    """Solve scenarios: plans[s, i] = grains of task i.

    Scenario s changes the tasks firsts[s], firsts[s] + 1, ... to forms[form_starts[s]:form_starts[s + 1]]:
    0 as the rows have it, 1 the `other` choices, 2 absent. At least one task each.
    """
    size = prefixes.shape[1] - 1
    nobody, nothing = np.zeros(1, dtype=np.int64), np.zeros(1)

    def choices(i: int, form: int) -> tuple[Ints, Floats, int]:
        if form == _ABSENT:
            return nobody, nothing, 0
        if form == 1:
            own = slice(other_starts[i], other_starts[i + 1])
            return other_points[own], other_values[own], int(other_stay[i])
        own = slice(starts[i], starts[i + 1])
        return points[own], values[own], int(stay[i])

    for s in range(len(firsts)):
        first, changed = int(firsts[s]), forms[form_starts[s] : form_starts[s + 1]]
        last = first + len(changed)
        taken = [choices(i, int(changed[i - first]) if i >= first else 0) for i in range(last)]
        rows = [*prefixes[: first + 1]]
        for own_points, own_values, _ in taken[first:]:
            rows.append(max_plus(rows[-1], own_points, own_values))
        totals = rows[last] + suffixes[last][::-1]
        passed = [np.flatnonzero(totals == totals.max())]
        for i in range(last - 1, -1, -1):
            passed.append(_passed(rows[i], rows[i + 1], passed[-1], *taken[i][:2]))
        passed.reverse()
        used = 0
        for i in range(last):
            own_points, own_values, here = taken[i]
            goals = used + own_points
            within = goals <= size
            own_points, own_values, goals = own_points[within], own_values[within], goals[within]
            still = np.isin(goals, passed[i + 1]) & (rows[i][used] + own_values == rows[i + 1][goals])
            optimal = own_points[still]
            plans[s, i] = here if here in optimal else optimal[0]
            used += int(plans[s, i])
        _read_right(points, values, starts, stay, suffixes, last, size - used, plans[s])


def _passed(row: Floats, after: Floats, goals: Ints, points: Ints, values: Floats) -> Ints:
    """Numbers of workers from which some choice leads optimally to one of `goals`."""
    if len(goals) * 4 < len(points):
        found = [np.zeros(0, dtype=np.int64)]
        for goal in goals.tolist():
            fits = points <= goal
            sources = goal - points[fits]
            found.append(sources[row[sources] + values[fits] == after[goal]])
    else:
        found = []
        for point, value in zip(points.tolist(), values.tolist(), strict=True):
            sources = goals[goals >= point] - point
            found.append(sources[row[sources] + value == after[sources + point]])
    return np.unique(np.concatenate(found))
