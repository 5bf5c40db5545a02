"""Which floors a plan meets, where not all of them can be met.

Rules
-----
* Floors that fit together are all met: only then is the objective weighed.
* Where they do not fit, tasks come in classes: those that are not preemptible before those that are, and among these
  the higher priority first. The floors of a class are weighed before anything is left for the next class.
* Within a class, tasks that have a turn go first, the highest turn before all others (starvation.py).
* Then counts what the floors are *worth*, not how many they are: the worth of a floor is what the cluster loses if it
  is not met, F(t, floor) * D_running, and for a task that runs also the price of stopping it, F(t, x) * D_restart, less
  that of healing it where it is faulty, F(t, x) * D_transition. So a task that runs goes before its equal, a healthy
  one before one whose worker died, and workers above a floor count against nobody's floor.
* Of sets that are worth the same, the one with more floors; then the one with the earlier tasks. So there is exactly
  one best set.
* A floor that no legal number of workers meets, or that is larger than the cluster, takes no part.
* With several pools each task's floor is met in one of them, with what it needs there.
* A floor weighs the open seats that it needs: what the task's residents meet costs the others nothing (`problem.py`).

    value(t) = an integer such that the best set of floors has the largest sum of values
    best set = argmax over sets with sum of open seats <= n' - closed of that sum     (a 0/1 knapsack, in unlimited
    integers)

The set is chosen before the plan: its floors are hard limits for the solver, those of the other tasks are gone.
Only this module compares floors; `solver.py`, `table.py`, `pools.py` and `feasibility.py` ask it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from unicrond.core.planning.problem import Number, Problem, TaskProblem

#: The most steps of the search for the floors that are met in several pools.
PLACEMENTS_MAX = 5000


def floors_to_meet(
    tasks: Sequence[TaskProblem], open_seats: int, d_running: Number, d_transition: Number
) -> tuple[int, ...]:
    """Return per task the workers of its floor where the plan has to meet it with so many open seats, else 0."""
    floors = tuple([task.floor_point for task in tasks])
    needs = [task.open_seats(floor) for task, floor in zip(tasks, floors, strict=True)]
    if sum(needs) <= open_seats:
        return floors
    values = floor_values(tasks, d_running, d_transition)
    best = _best_set(
        [(need, value if floor else 0) for need, value, floor in zip(needs, values, floors, strict=True)], open_seats
    )
    return tuple([floor if i in best else 0 for i, floor in enumerate(floors)])


def floor_values(tasks: Sequence[TaskProblem], d_running: Number, d_transition: Number) -> tuple[int, ...]:
    """Return per task the value of its met floor: the better of two sets has the larger sum. Of tasks without a floor:
    0.

    Each class has three digits of one large number, the highest class first: turns, worth, count; the last digits are
    the order of the tasks. A digit's base is above the sum of that digit over all tasks.
    """
    worths = [floor_worth(task, d_running, d_transition) if task.floor else Fraction(0) for task in tasks]
    denominator = lcm(*(worth.denominator for worth in worths))
    classes = sorted({task.priority_class for task in tasks if task.floor}, reverse=True)
    values = [0] * len(tasks)
    for priority_class in classes:
        members = [i for i, task in enumerate(tasks) if task.floor and task.priority_class == priority_class]
        digits = (
            {i: 1 << tasks[i].turn if tasks[i].turn else 0 for i in members},
            {i: int(worths[i] * denominator) for i in members},
            dict.fromkeys(members, 1),
        )
        for digit in digits:
            base = sum(digit.values()) + 1
            values = [value * base + digit.get(i, 0) for i, value in enumerate(values)]
    last = len(tasks) - 1
    return tuple([(value << len(tasks)) + (1 << last - i) if value else 0 for i, value in enumerate(values)])


def floor_worth(task: TaskProblem, d_running: Number, d_transition: Number) -> Fraction:
    """Return what the cluster loses if the floor is not met, in weighted FLOP/s times the unit of the durations."""
    if task.floor_worth is not None:
        return task.floor_worth
    floor = task.floor_point
    achieved = max((task.waf(floor, layout) for layout in task.legal_layouts(floor)), default=Fraction(0))
    transition = d_transition if task.d_transition_us is None else task.d_transition_us
    restart = task.prices.over(transition)[2]
    stop = Fraction(restart) - (Fraction(transition) if task.faulty else 0)
    return achieved * Fraction(d_running) + task.waf(task.workers) * stop


def problem_floors(problem: Problem) -> tuple[int, ...]:
    """Return `floors_to_meet` of a whole problem."""
    return floors_to_meet(problem.tasks, problem.open_workers, problem.d_running_us, problem.d_transition_us)


def problem_values(problem: Problem) -> tuple[int, ...]:
    """Return `floor_values` of a whole problem."""
    return floor_values(problem.tasks, problem.d_running_us, problem.d_transition_us)


def with_floor_worths(problem: Problem) -> Problem:
    """Return the problem with the worth of each floor written down, so that it stays when choices are taken away."""
    durations = problem.d_running_us, problem.d_transition_us
    tasks = [replace(task, floor_worth=floor_worth(task, *durations)) if task.floor else task for task in problem.tasks]
    return replace(problem, tasks=tuple(tasks))


def place_floors(
    seats_of: Sequence[Sequence[int | None]], values: Sequence[int], seats: Sequence[int]
) -> tuple[dict[int, int], bool]:
    """Return the best set of floors where each task is in one of several pools, with the pool of each task; and whether
    it is known to be best, after PLACEMENTS_MAX steps at most.

    `seats_of`: per task and pool the open seats that its floor needs, None where it cannot be met; `values`: as of
    `floor_values`; `seats`: the open seats of each pool. The search goes depth first, largest floors first. What the
    rest may add is at most the best set for all seats that are left, whichever pools they are in.
    """
    least_of = {i: min([n for n in own if n is not None], default=0) for i, own in enumerate(seats_of) if values[i]}
    claimants = sorted([i for i, least in least_of.items() if least], key=lambda i: (-least_of[i], -values[i]))
    grain = gcd(*[least_of[i] for i in claimants]) or 1
    rows = [np.zeros(sum(seats) // grain + 1, dtype=object)]
    for i in reversed(claimants):
        rows.append(_with_claim(rows[-1], least_of[i] // grain, values[i]))
    rows.reverse()
    best, best_places = -1, tuple[int, ...]()
    branches: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [(0, 0, tuple(seats), ())]
    for _ in range(PLACEMENTS_MAX):
        if not branches:
            break
        at, value, free, places = branches.pop()
        if value + rows[at][sum(free) // grain] <= best:
            continue
        if at == len(claimants):
            best, best_places = value, places
            continue
        i = claimants[at]
        further = [(at + 1, value, free, (*places, -1))]
        for place, need in enumerate(seats_of[i]):
            if need is not None and need <= free[place]:
                after = (*free[:place], free[place] - need, *free[place + 1 :])
                further.append((at + 1, value + values[i], after, (*places, place)))
        row = rows[at + 1]
        branches += sorted(
            further, key=lambda branch: (branch[1] + row[sum(branch[2]) // grain], branch[1], -max(branch[2]))
        )
    place_of = {i: place for i, place in zip(claimants, best_places, strict=False) if place >= 0}
    return place_of, not branches


def _with_claim(row: NDArray[np.object_], seats: int, value: int) -> NDArray[np.object_]:
    """Return the row of the best values per number of seats, with one more claim."""
    longer = row.copy()
    if seats < len(row):
        np.maximum(longer[seats:], row[: len(row) - seats] + value, out=longer[seats:])
    return longer


def _best_set(claims: Sequence[tuple[int, int]], open_seats: int) -> frozenset[int]:
    """Return the indices of the (seats, value) whose values have the largest sum, with at most so many open seats."""
    claimants = [i for i, (seats, value) in enumerate(claims) if value and seats <= open_seats]
    grain = gcd(*(claims[i][0] for i in claimants)) or 1
    rows = [np.zeros(open_seats // grain + 1, dtype=object)]
    for i in claimants:
        rows.append(_with_claim(rows[-1], claims[i][0] // grain, claims[i][1]))
    at, best = open_seats // grain, set()
    for i, before, after in zip(reversed(claimants), rows[-2::-1], rows[:0:-1], strict=True):
        if after[at] != before[at]:
            best.add(i)
            at -= claims[i][0] // grain
    return frozenset(best)
