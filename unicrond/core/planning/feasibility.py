"""Room for a plan: worker counts that add up may still not fit on the nodes.

A tensor-parallel group runs on one node, so two nodes with one free slot each hold no group of two. The solver limits
only the sum of workers, so its answer may be such a plan.

Rules
-----
* A plan has room if all its groups can be packed into the nodes, wherever workers are now.
* Groups are packed from the largest to the smallest into the fullest node that still has room. Where each size divides
  the next larger one (1, 2, 4, 8) that finds room whenever there is any; for other sizes it may miss some.
* Only open nodes are packed, and only with groups that need seats there (`TaskProblem.open_seats`). A replica that
  stands on open and closed nodes stays on the very open ones: this is not regarded.
* If the best plan has no room, it is excluded and the next best is searched: any plan that has room needs less for
  at least one task whose groups are as large as the one that found none, or larger. So the problem splits into
  one for each of these, in which that task may not have as much, and the search continues with the best of all. The
  result is the best plan that has room, ties included.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import pairwise
from typing import TypeAlias

from unicrond.core.planning.floors import with_floor_worths
from unicrond.core.planning.problem import Problem, TaskProblem
from unicrond.core.planning.solution import Solution

#: (slots, how many nodes have them), rising.
Seats: TypeAlias = tuple[tuple[int, int], ...]

#: How many plans are excluded before the search gives up; the plan then reports what has no seat (deciding/plans.py).
TRIES_MAX = 100


def seats_of(nodes: Mapping[str, int]) -> Seats:
    """Return the seats of nodes with so many slots each."""
    return tuple(sorted((slots, count) for slots, count in Counter(nodes.values()).items() if slots))


def seats_matter(tasks: Iterable[TaskProblem]) -> bool:
    """Return whether any of the tasks may have workers that must share a node."""
    return any(task.tp > 1 or any(option.shape.tp > 1 for option in task.alternatives) for task in tasks)


def packs(groups: Mapping[int, int], seats: Seats) -> bool:
    """Return whether `groups` (workers of a group -> how many) find room. Single workers are groups of 1."""
    return not unseated(groups, seats)


def unseated(groups: Mapping[int, int], seats: Seats) -> int:
    """Return the largest size of which a group finds no room; 0 if all groups do."""
    demand = sorted((size, count) for size, count in groups.items() if count)
    sizes = [size for size, _ in demand]
    if sum(size * count for size, count in demand) > sum(slots * nodes for slots, nodes in seats):
        return 1
    if not sizes or (_divide(sizes) and all(slots % sizes[-1] == 0 for slots, _ in seats)):
        return 0
    return _packed(demand, seats)


def _divide(sizes: Sequence[int]) -> bool:
    return all(larger % size == 0 for size, larger in pairwise(sizes))


def _packed(demand: Sequence[tuple[int, int]], seats: Seats) -> int:
    """Return the same as `unseated`, by best fit, the largest groups first. Nodes with equally many free slots are one
    entry."""
    nodes = Counter(dict(seats))
    gaps = sorted(nodes)
    for size, count in reversed(demand):
        remaining = count
        while remaining:
            index = bisect_left(gaps, size)
            if index == len(gaps):
                return size
            gap = gaps[index]
            per_node = gap // size
            nodes_used = min(nodes[gap], max(1, remaining // per_node))
            placed = min(remaining, nodes_used * per_node) if remaining >= per_node else remaining
            if remaining < per_node:
                nodes_used = 1
            remaining -= placed
            rest = gap - size * (placed // nodes_used)
            nodes[gap] -= nodes_used
            if not nodes[gap]:
                gaps.pop(index)
            if rest:
                if not nodes[rest]:
                    insort(gaps, rest)
                nodes[rest] += nodes_used
    return 0


def groups_of(problem: Problem, workers: Sequence[int], layouts: Sequence[int]) -> Counter[int]:
    """Count the tensor-parallel groups of a plan that need seats on open nodes, by size."""
    groups: Counter[int] = Counter()
    for task, count, layout in zip(problem.tasks, workers, layouts, strict=True):
        tp = task.shape_of(layout).tp
        groups[tp] += task.open_seats(count, layout) // tp
    return groups


def has_room(solution: Solution) -> bool:
    """Return whether the plan fits on the problem's nodes; groups are packed only where the problem names seats."""
    problem = solution.problem
    if problem.closed and _open_seats(solution) > problem.open_workers:
        return False
    if not problem.seats or _always_fit(problem):
        return True
    return packs(groups_of(problem, solution.workers, solution.layouts), problem.seats)


def _open_seats(solution: Solution) -> int:
    """Count the seats on open nodes that the plan needs."""
    choices = zip(solution.problem.tasks, solution.workers, solution.layouts, strict=True)
    return sum([task.open_seats(count, layout) for task, count, layout in choices])


def _always_fit(problem: Problem) -> bool:
    """Return whether groups that add up always find room: all sizes divide each other, and the slots of each node."""
    sizes = sorted(set[int]().union(*[task.group_sizes for task in problem.tasks]))
    return not sizes or (_divide(sizes) and all(slots % sizes[-1] == 0 for slots, _ in problem.seats))


def best_with_room(first: Solution, solve: Callable[[Problem], Solution]) -> Solution:
    """Return the best plan that has room. `first`: the best plan of all; `solve` solves a problem without regard to its
    `seats`.

    After TRIES_MAX plans without room, return the best of the remaining ones, whether it has room or not.
    """
    problem = first.problem
    open_ones: list[tuple[int, Fraction, tuple[object, ...], int, Solution]] = []
    attempts = 0

    def add(solution: Solution) -> None:
        """Add a solution to the open plans, ordered as the canonical plan requires."""
        nonlocal attempts
        candidate = replace(solution, problem=problem, fixed_layouts=solution.layouts)
        taste = tuple(
            (count != task.workers, count, layout > 0, -task.waf(count, layout), layout)
            for task, count, layout in zip(problem.tasks, candidate.workers, candidate.layouts, strict=True)
        )
        heappush(open_ones, (candidate.shortfall, -candidate.exact_objective, taste, attempts, solution))
        attempts += 1

    add(replace(first, problem=with_floor_worths(problem)))
    visited = {first.problem.tasks}
    while True:
        *_, best = heappop(open_ones)
        candidate = replace(best, problem=problem, fixed_layouts=best.layouts)
        needed = unseated(groups_of(problem, candidate.workers, candidate.layouts), problem.seats)
        if not needed or attempts >= TRIES_MAX:
            return candidate
        for place, (task, count) in enumerate(best):
            layout = best.layouts[place]
            tp = task.shape_of(layout).tp
            if not task.open_seats(count, layout) or tp < needed:
                continue  # without this task the larger groups would find no more room
            less = _capped_below(task, tp, count)
            tasks = (*best.problem.tasks[:place], less, *best.problem.tasks[place + 1 :])
            if tasks not in visited:
                visited.add(tasks)
                add(solve(replace(best.problem, tasks=tasks)))


def _capped_below(task: TaskProblem, tp: int, workers: int) -> TaskProblem:
    """Return the task without all choices that need as much room as `workers` in groups of `tp`, or more. Residents are
    of one layout alone: more workers always need more room."""

    def most(size: int, unit: int, cap: int | None) -> int | None:
        """Return the cap of a layout with groups of `size`: the most workers that need less room."""
        if size < tp:
            return cap
        groups = -(-(workers // tp) // (size // tp)) - 1  # of `size`, the most that are less
        lowered = groups * size // unit * unit
        return lowered if cap is None else min(cap, lowered)

    alternatives = tuple(
        replace(option, most=most(option.shape.tp, option.shape.workers, option.most)) for option in task.alternatives
    )
    return replace(task, max_workers=most(task.tp, task.unit, task.max_workers), alternatives=alternatives)
