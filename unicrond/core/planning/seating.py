"""Whether a plan finds room: counts that add up can still want nodes that are not there.

A tensor-parallel group stands on one node, so two nodes with one free slot each hold no group of two. Where the sum of
workers is the only limit that the solver knows, its answer may be such a plan.

Rules
-----
* A plan has room if all its groups can be packed into the nodes, wherever anybody stands now.
* Groups are packed from the largest to the smallest into the fullest node that still has room. Where each size divides
  the next larger one (1, 2, 4, 8) that finds room whenever there is any; for other sizes it may miss some.
* If the best plan has no room, it is left out and the next best is looked for: any plan that has room wants less for
  at least one task of those whose groups are as large as the one that found none, or larger. So the problem splits into
  one for each of these, in which that task may not want as much, and the best of all goes on. What comes out is the
  best plan that has room, ties included.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from unicrond.core.planning.problem import Problem, TaskProblem

if TYPE_CHECKING:
    from unicrond.core.planning.solver import Solution

#: (slots, how many nodes have them), rising.
Seats: TypeAlias = tuple[tuple[int, int], ...]

#: As many plans are left out before the search gives up; what has no seat then is told (deciding/plans.py).
TRIES_MAX = 100


def seats_of(nodes: Mapping[str, int]) -> Seats:
    """The seats of nodes with so many slots each."""
    return tuple(sorted((slots, count) for slots, count in Counter(nodes.values()).items() if slots))


def seats_matter(tasks: Iterable[TaskProblem]) -> bool:
    """Whether any of the tasks may have workers that must share a node."""
    return any(task.tp > 1 or any(other.shape.tp > 1 for other in task.others) for task in tasks)


def packs(groups: Mapping[int, int], seats: Seats) -> bool:
    """Whether `groups` (workers of a group -> how many) find room. Workers by themselves are groups of 1."""
    return not unseated(groups, seats)


def unseated(groups: Mapping[int, int], seats: Seats) -> int:
    """The largest size of which a group finds no room; 0: all do."""
    wanted = sorted((size, count) for size, count in groups.items() if count)
    sizes = [size for size, _ in wanted]
    if sum(size * count for size, count in wanted) > sum(slots * nodes for slots, nodes in seats):
        return 1
    if not sizes or (_divide(sizes) and all(slots % sizes[-1] == 0 for slots, _ in seats)):
        return 0
    return _packed(wanted, seats)


def _divide(sizes: Sequence[int]) -> bool:
    return all(larger % size == 0 for size, larger in pairwise(sizes))


def _packed(wanted: Sequence[tuple[int, int]], seats: Seats) -> int:
    """`unseated`, by best fit, the largest first. Nodes with as many free slots are one entry."""
    nodes = Counter(dict(seats))
    gaps = sorted(nodes)
    for size, count in reversed(wanted):
        left = count
        while left:
            at = bisect_left(gaps, size)
            if at == len(gaps):
                return size
            gap = gaps[at]
            each = gap // size
            used = min(nodes[gap], max(1, left // each))
            taken = min(left, used * each) if left >= each else left
            if left < each:
                used = 1
            left -= taken
            rest = gap - size * (taken // used)
            nodes[gap] -= used
            if not nodes[gap]:
                gaps.pop(at)
            if rest:
                if not nodes[rest]:
                    insort(gaps, rest)
                nodes[rest] += used
    return 0


def groups_of(problem: Problem, workers: Sequence[int], layouts: Sequence[int]) -> Counter[int]:
    """The tensor-parallel groups of a plan, by size."""
    groups: Counter[int] = Counter()
    for task, count, layout in zip(problem.tasks, workers, layouts, strict=True):
        tp = task.shape_of(layout).tp
        groups[tp] += count // tp
    return groups


def has_room(solution: Solution) -> bool:
    """Whether the plan finds seats on the problem's nodes; always where these are not asked."""
    problem = solution.problem
    if not problem.seats or _always_fit(problem):
        return True
    return packs(groups_of(problem, solution.workers, solution.layouts), problem.seats)


def _always_fit(problem: Problem) -> bool:
    """Whatever adds up finds room: all sizes divide each other, and the slots of each node."""
    sizes = sorted(set[int]().union(*[task.group_sizes for task in problem.tasks]))
    return not sizes or (_divide(sizes) and all(slots % sizes[-1] == 0 for slots, _ in problem.seats))


def best_with_room(first: Solution, solve: Callable[[Problem], Solution]) -> Solution:
    """The best plan that has room. `first`: the best plan of all; `solve`: answers a problem, its seats aside.

    After TRIES_MAX plans without room the best of what is left, seated or not.
    """
    problem = first.problem
    open_ones: list[tuple[tuple[int, int], Fraction, tuple[object, ...], int, Solution]] = []
    tried = 0

    def add(found: Solution) -> None:
        nonlocal tried
        own = replace(found, problem=problem, given=found.layouts)
        taste = tuple(
            (count != task.workers, count, layout > 0, -task.waf(count, layout), layout)
            for task, count, layout in zip(problem.tasks, own.workers, own.layouts, strict=True)
        )
        heappush(open_ones, (own.shortfall, -own.exact_objective, taste, tried, found))
        tried += 1

    add(first)
    seen = {first.problem.tasks}
    while True:
        *_, best = heappop(open_ones)
        own = replace(best, problem=problem, given=best.layouts)
        needed = unseated(groups_of(problem, own.workers, own.layouts), problem.seats)
        if not needed or tried >= TRIES_MAX:
            return own
        for place, (task, count) in enumerate(best):
            tp = task.shape_of(best.layouts[place]).tp
            if not count or tp < needed:
                continue  # without it the larger ones would find no more room
            less = _wants_less(task, tp, count)
            tasks = (*best.problem.tasks[:place], less, *best.problem.tasks[place + 1 :])
            if tasks not in seen:
                seen.add(tasks)
                add(solve(replace(best.problem, tasks=tasks)))


def _wants_less(task: TaskProblem, tp: int, workers: int) -> TaskProblem:
    """The task without all choices that want as much room as `workers` in groups of `tp`, or more."""

    def most(size: int, unit: int, cap: int | None) -> int | None:
        if size < tp:
            return cap
        groups = -(-(workers // tp) // (size // tp)) - 1  # of `size`, the most that are less
        lowered = groups * size // unit * unit
        return lowered if cap is None else min(cap, lowered)

    others = tuple(replace(other, most=most(other.shape.tp, other.shape.workers, other.most)) for other in task.others)
    return replace(task, max_workers=most(task.tp, task.unit, task.max_workers), others=others)
