"""The compiled kernel: the twins of `kernel_numpy.py`, bit for bit. The meaning of the rows is described there.

All functions release the GIL and are compiled for fixed types when this module is imported, from numba's
cache after the first time: the event loop neither waits for a compilation nor for a plan.

The work is the max-plus product of a dense row with sparse points. It goes block by block, so that the
part of the result being made stays in the L1 cache, and eight points at a time, so that it is loaded and
stored once per eight additions. The row is padded with -inf in front: no bounds in the inner loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_BLOCK = 1536
_CACHED_STATES = 8

_I = "i8[::1]"
_F = "f8[::1]"
_R = "f8[:, ::1]"
_R2 = "i8[:, ::1]"
_POINTS = f"{_I}, {_F}, {_I}, {_I}"


def _compiled(signature: str) -> Any:
    return njit(signature, cache=True, nogil=True, error_model="numpy")


@_compiled(f"Tuple(({_F}, {_F}, {_F}))({_I}, {_F}, {_I}, {_F}, {_I}, {_I}, {_I}, i8)")
def bounds(workers, flops, starts, weight, minimum, cap, unit, limit):  # type: ignore[no-untyped-def]
    """Compute the bounds; see kernel_numpy.bounds."""
    count = len(weight)
    highest, at_zero, steepest = np.zeros(count), np.zeros(count), np.zeros(count)
    for i in range(count):
        for p in range(starts[i], starts[i + 1]):
            at_workers = workers[p]
            if at_workers > limit or at_workers > cap[i] or at_workers < minimum[i] or at_workers % unit[i] != 0:
                continue
            waf = flops[p] * weight[i]
            highest[i] = max(highest[i], waf)
            if at_workers == 0:
                at_zero[i] = waf
            else:
                steepest[i] = max(steepest[i], (waf - at_zero[i]) / at_workers)
    return highest, at_zero, steepest


@_compiled(
    f"Tuple(({_I}, {_F}, {_I}, {_I}))({_I}, {_F}, {_F}, {_R}, {_I}, {_F}, {_I}, {_I}, {_I}, {_I}, {_F}, {_I}, {_F}, "
    f"{_I}, i8, f8, f8, i8)"
)
def useful(  # type: ignore[no-untyped-def]  # noqa: C901  # a compiled loop: calls in it cost time
    workers,
    flops,
    alt_flops,
    prices,
    starts,
    weight,
    minimum,
    cap,
    unit,
    present,
    present_flops,
    floor,
    staying,
    forms,
    limit,
    d_running,
    inverse_quantum,
    grain,
):
    """Compute the useful points; see kernel_numpy.useful."""
    count = len(weight)
    points = np.empty(len(workers) + 3 * count, dtype=np.int64)
    values = np.empty(len(points))
    ends = np.zeros(count + 1, dtype=np.int64)
    stay = np.full(count, -1, dtype=np.int64)
    extra = np.empty(4, dtype=np.int64)
    filled = 0
    for i in range(count):
        if forms[i] == 2:
            points[filled], values[filled], stay[i] = 0, 0.0, 0
            filled += 1
            ends[i + 1] = filled
            continue
        most = min(cap[i], limit)
        stays = floor[i] <= present[i] <= most and present[i] % unit[i] == 0
        # The points of the curve, with 0, the floor and the present point merged in.
        extra[0], extra[1], extra[2], extra[3] = 0, floor[i], present[i] if stays else 0, np.int64(2**62)
        extra.sort()
        best = -np.inf
        p, e = starts[i], 0
        while True:
            while p < starts[i + 1] and (workers[p] < minimum[i] or workers[p] % unit[i] != 0):
                p += 1
            of_curve = workers[p] if p < starts[i + 1] else np.int64(2**62)
            at_workers = min(of_curve, extra[e])
            if at_workers > most:
                break
            gain = -np.inf
            if at_workers == of_curve:
                if flops[p] > 0:
                    gain = flops[p] * weight[i] * d_running
                if alt_flops[p] > 0:
                    gain = max(gain, alt_flops[p] * weight[i] * d_running - prices[i, forms[i]])
                p += 1
            while extra[e] == at_workers:
                e += 1
            if stays and at_workers == present[i] and present_flops[i] > 0:
                present_gain = present_flops[i] * weight[i] * d_running
                if forms[i] == 0:
                    present_gain += staying[i]
                gain = max(gain, present_gain)
            if gain == -np.inf:
                gain = -prices[i, 2 + forms[i]]
            if at_workers < floor[i]:
                continue
            value = np.rint(gain * inverse_quantum)
            is_present = stays and at_workers == present[i]
            if value > best or is_present:
                points[filled], values[filled] = at_workers // grain, value
                filled += 1
                best = max(best, value)
        if stays:
            stay[i] = present[i] // grain
        ends[i + 1] = filled
    return points[:filled].copy(), values[:filled].copy(), ends, stay


@_compiled(f"void({_F}, {_I}, {_F}, i8, i8, {_F}, {_F})")
def _max_plus(row, points, values, first, end, padded, out):  # type: ignore[no-untyped-def]
    """Write the max-plus product into `out`. `padded`: 2 * len(row) numbers of scratch, the first half -inf."""
    size = len(row)
    padded[size:] = row
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        out[start:stop] = -np.inf
        high = size + stop
        p = first
        while p + 8 <= end and points[p] < stop:
            begin = max(start, points[p])  # left of the smallest point there is nothing
            block, width, low = out[begin:stop], stop - begin, size + begin
            r0, v0 = padded[low - points[p] : high - points[p]], values[p]
            r1, v1 = padded[low - points[p + 1] : high - points[p + 1]], values[p + 1]
            r2, v2 = padded[low - points[p + 2] : high - points[p + 2]], values[p + 2]
            r3, v3 = padded[low - points[p + 3] : high - points[p + 3]], values[p + 3]
            r4, v4 = padded[low - points[p + 4] : high - points[p + 4]], values[p + 4]
            r5, v5 = padded[low - points[p + 5] : high - points[p + 5]], values[p + 5]
            r6, v6 = padded[low - points[p + 6] : high - points[p + 6]], values[p + 6]
            r7, v7 = padded[low - points[p + 7] : high - points[p + 7]], values[p + 7]
            for j in range(width):
                a, b = r0[j] + v0, r1[j] + v1
                c, d = r2[j] + v2, r3[j] + v3
                e, f = r4[j] + v4, r5[j] + v5
                g, h = r6[j] + v6, r7[j] + v7
                a = a if a > b else b
                c = c if c > d else d
                e = e if e > f else f
                g = g if g > h else h
                a = a if a > c else c
                e = e if e > g else g
                a = a if a > e else e
                block[j] = a if a > block[j] else block[j]
            p += 8
        while p < end and points[p] < stop:
            begin = max(start, points[p])
            block, width, low = out[begin:stop], stop - begin, size + begin
            r0, v0 = padded[low - points[p] : high - points[p]], values[p]
            for j in range(width):
                a = r0[j] + v0
                block[j] = a if a > block[j] else block[j]
            p += 1


@_compiled(f"{_F}(i8)")
def _scratch(size):  # type: ignore[no-untyped-def]
    padded = np.empty(2 * size)
    padded[:size] = -np.inf
    return padded


@_compiled(f"void({_I}, {_F}, {_I}, {_R}, i8)")
def prefix(points, values, starts, rows, last_valid):  # type: ignore[no-untyped-def]
    """Fill the prefix rows; see kernel_numpy.prefix."""
    padded = _scratch(rows.shape[1])
    for i in range(last_valid, len(starts) - 1):
        _max_plus(rows[i], points, values, starts[i], starts[i + 1], padded, rows[i + 1])


@_compiled(f"void({_I}, {_F}, {_I}, {_R}, i8)")
def suffix(points, values, starts, rows, first_valid):  # type: ignore[no-untyped-def]
    """Fill the suffix rows; see kernel_numpy.suffix."""
    padded = _scratch(rows.shape[1])
    for i in range(first_valid - 1, -1, -1):
        _max_plus(rows[i + 1], points, values, starts[i], starts[i + 1], padded, rows[i])


@_compiled(f"i8({_I}, {_F}, i8, i8, i8, {_F}, f8, i8)")
def _choice(points, values, first, end, stay, row, best, remaining):  # type: ignore[no-untyped-def]
    """Return the first point in the order of ties with value + row[remaining - point] == best. `row`: the tasks
    behind."""
    smallest = np.int64(-1)
    for p in range(first, end):
        if points[p] > remaining:
            break
        if values[p] + row[remaining - points[p]] == best:
            if points[p] == stay:
                return points[p]
            if smallest < 0:
                smallest = points[p]
    return smallest


@_compiled(f"{_I}({_I}, {_F}, {_I}, {_I}, {_R})")
def read_back(points, values, starts, stay, rows):  # type: ignore[no-untyped-def]
    """Read the plan back; see kernel_numpy.read_back."""
    plan = np.zeros(len(starts) - 1, dtype=np.int64)
    remaining = np.int64(rows.shape[1] - 1)
    for i in range(len(plan)):
        plan[i] = _choice(points, values, starts[i], starts[i + 1], stay[i], rows[i + 1], rows[i][remaining], remaining)
        remaining -= plan[i]
    return plan


@_compiled(f"i8({_I}, {_F}, i8, i8, {_F}, {_F}, i8, {_I}, i8)")
def _sources(points, values, first, end, row, after, goal, into, at):  # type: ignore[no-untyped-def]
    """Write to into[at:...] the worker counts from which some point leads optimally to `goal`; return the end."""
    for p in range(first, end):
        source = goal - points[p]
        if source < 0:
            break
        if row[source] + values[p] == after[goal]:
            into[at] = source
            at += 1
    return at


@_compiled(f"i8({_I}, i8)")
def _slot(states, state):  # type: ignore[no-untyped-def]
    """Return where the state is cached or can be (-1 marks a free slot); -1 if there is no room for it."""
    for c in range(len(states)):
        if states[c] == state or states[c] < 0:
            return c
    return -1


@_compiled(f"{_I}({_I}, i8, i8)")
def _reserve(store, filled, more):  # type: ignore[no-untyped-def]
    """Return the store itself, or a larger copy if `more` do not fit behind `filled`."""
    if filled + more <= len(store):
        return store
    larger = np.empty(2 * len(store) + more, dtype=np.int64)
    larger[:filled] = store[:filled]
    return larger


@_compiled(f"void({_R}, i8, {_I}, {_F}, i8, {_I}, {_F}, {_I}, {_I}, {_F}, {_I}, {_F})")
def _extend(  # type: ignore[no-untyped-def]
    chain, alike, changed, before, first, points, values, starts, alt_points, alt_values, alt_starts, padded
):
    """Compute the rows behind each changed task, of which the first `alike` stand already. `before`: the row before
    them all."""
    for c in range(alike, len(changed)):
        i = first + c
        row = before if c == 0 else chain[c - 1]
        if changed[c] == 2:
            chain[c] = row
        elif changed[c] == 1:
            _max_plus(row, alt_points, alt_values, alt_starts[i], alt_starts[i + 1], padded, chain[c])
        else:
            _max_plus(row, points, values, starts[i], starts[i + 1], padded, chain[c])


@_compiled(f"i8({_F}, {_F}, {_I})")
def _best_splits(prefix_row, suffix_row, into):  # type: ignore[no-untyped-def]
    """Write the worker counts on the left of all best plans into `into`; return how many there are."""
    best, size, filled = -np.inf, len(prefix_row), 0
    for j in range(size):
        best = max(best, prefix_row[j] + suffix_row[size - 1 - j])
    for j in range(size):
        if prefix_row[j] + suffix_row[size - 1 - j] == best:
            into[filled] = j
            filled += 1
    return filled


@_compiled(f"void({_POINTS}, {_R}, i8, i8, {_R2}, {_R2}, {_I})")
def _read_right(  # type: ignore[no-untyped-def]
    points, values, starts, stay, suffixes, last, remaining, choice_left, choice_made, plan
):
    """Read the plan of the tasks from `last` on, which have `remaining` workers; choices made there before are
    cached."""
    for i in range(last, len(stay)):
        slot = _slot(choice_left[i], remaining)
        if slot >= 0 and choice_left[i, slot] == remaining:
            point = choice_made[i, slot]
        else:
            point = _choice(
                points, values, starts[i], starts[i + 1], stay[i], suffixes[i + 1], suffixes[i][remaining], remaining
            )
            if slot >= 0:
                choice_left[i, slot], choice_made[i, slot] = remaining, point
        plan[i] = point
        remaining -= point


@_compiled(f"void({_I}, {_F}, {_I}, {_I}, {_R}, {_R}, {_I}, {_F}, {_I}, {_I}, {_I}, {_I}, {_I}, i8[:, ::1])")
def answer(  # type: ignore[no-untyped-def]  # noqa: C901  # a compiled loop: calls in it cost time
    points,
    values,
    starts,
    stay,
    prefixes,
    suffixes,
    alt_points,
    alt_values,
    alt_starts,
    alt_stay,
    firsts,
    form_starts,
    forms,
    plans,
):
    """Solve scenarios; see kernel_numpy.answer."""
    # The two reading loops stay here: as functions of their own, even inlined, they made this 10 to 40 % slower.
    tasks, size = len(starts) - 1, prefixes.shape[1]
    zero_points, zero_values = np.zeros(1, dtype=np.int64), np.zeros(1)
    padded = _scratch(size)
    longest = 0
    for s in range(len(firsts)):
        longest = max(longest, form_starts[s + 1] - form_starts[s])
    chain = np.empty((longest, size))
    # states[states_from[i]:states_from[i] + states_count[i]]: the worker counts of the first i tasks together in
    # optimal plans. They are few, unless ties abound: then the store grows.
    states = np.empty(4 * (tasks + 1) + size, dtype=np.int64)
    states_from = np.zeros(tasks + 1, dtype=np.int64)
    states_count = np.zeros(tasks + 1, dtype=np.int64)
    last_stamp = np.full(size, -1, dtype=np.int64)
    stamp = 0
    # Scenarios mostly pass through the same few states of the shared rows: those are read once. Per task there are
    # _CACHED_STATES states; on the left cache[cache_at[i, c]:...] holds the number of sources and the sources, on
    # the right is the choice itself.
    cache = np.empty(16 * (tasks + 1) + size, dtype=np.int64)
    cache_filled = 0
    cache_goal = np.full((tasks, _CACHED_STATES), -1, dtype=np.int64)
    cache_at = np.empty((tasks, _CACHED_STATES), dtype=np.int64)
    choice_left = np.full((tasks, _CACHED_STATES), -1, dtype=np.int64)
    choice_made = np.empty((tasks, _CACHED_STATES), dtype=np.int64)
    scratch = np.empty(size, dtype=np.int64)
    for s in range(len(firsts)):
        first = firsts[s]
        changed = forms[form_starts[s] : form_starts[s + 1]]
        last = first + len(changed)
        alike = 0  # the rows that the scenario before has left in the chain
        if s > 0 and firsts[s - 1] == first:
            before_forms = forms[form_starts[s - 1] : form_starts[s]]
            while alike < min(len(changed), len(before_forms)) and changed[alike] == before_forms[alike]:
                alike += 1
        _extend(
            chain, alike, changed, prefixes[first], first, points, values, starts,
            alt_points, alt_values, alt_starts, padded,
        )  # fmt: skip
        filled = _best_splits(chain[last - first - 1], suffixes[last], states)
        states_from[last], states_count[last] = 0, filled
        for i in range(last - 1, -1, -1):
            row = prefixes[i] if i <= first else chain[i - first - 1]
            after = prefixes[i + 1] if i < first else chain[i - first]
            form = changed[i - first] if i >= first else 0
            if form == 2:
                choice_points, choice_values, begin, finish = zero_points, zero_values, 0, 1
            elif form == 1:
                choice_points, choice_values, begin, finish = alt_points, alt_values, alt_starts[i], alt_starts[i + 1]
            else:
                choice_points, choice_values, begin, finish = points, values, starts[i], starts[i + 1]
            states = _reserve(states, filled, size)
            stamp += 1
            states_from[i] = filled
            for g in range(states_from[i + 1], states_from[i + 1] + states_count[i + 1]):
                goal = states[g]
                slot = _slot(cache_goal[i], goal) if i < first else -1
                if slot < 0:
                    stop = _sources(choice_points, choice_values, begin, finish, row, after, goal, scratch, 0)
                    sources = scratch[:stop]
                else:
                    if cache_goal[i, slot] < 0:
                        cache = _reserve(cache, cache_filled, size + 1)
                        cache_goal[i, slot], cache_at[i, slot] = goal, cache_filled
                        stop = _sources(
                            choice_points, choice_values, begin, finish, row, after, goal, cache, cache_filled + 1
                        )
                        cache[cache_filled] = stop - cache_filled - 1
                        cache_filled = stop
                    start = cache_at[i, slot] + 1
                    sources = cache[start : start + cache[start - 1]]
                for source in sources:
                    if last_stamp[source] != stamp:
                        last_stamp[source] = stamp
                        states[filled] = source
                        filled += 1
            states_count[i] = filled - states_from[i]
        total = np.int64(0)
        for i in range(last):
            row = prefixes[i] if i <= first else chain[i - first - 1]
            after = prefixes[i + 1] if i < first else chain[i - first]
            form = changed[i - first] if i >= first else 0
            if form == 2:
                plans[s, i] = 0
                continue
            if form == 1:
                choice_points, choice_values, begin, finish, stay_point = (
                    alt_points, alt_values, alt_starts[i], alt_starts[i + 1], alt_stay[i]
                )  # fmt: skip
            else:
                choice_points, choice_values, begin, finish, stay_point = (
                    points,
                    values,
                    starts[i],
                    starts[i + 1],
                    stay[i],
                )
            choice = np.int64(-1)
            for g in range(states_from[i + 1], states_from[i + 1] + states_count[i + 1]):
                point = states[g] - total
                if point < 0 or (choice >= 0 and (choice == stay_point or (point > choice and point != stay_point))):
                    continue
                p = begin + np.searchsorted(choice_points[begin:finish], point)
                if p < finish and choice_points[p] == point and row[total] + choice_values[p] == after[states[g]]:
                    choice = point
            plans[s, i] = choice
            total += choice
        _read_right(points, values, starts, stay, suffixes, last, size - 1 - total, choice_left, choice_made, plans[s])
