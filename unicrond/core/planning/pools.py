"""Several types of GPU: which task is on which, and the exact plan of each type's nodes.

Rules
-----
* A *pool* is all nodes of one type. A task has all its workers in one pool, so a deal of the tasks among the pools
  leaves one problem for each pool, which `solver.solve` answers exactly. What a pool is worth depends on its own tasks
  alone: unmet floors and objectives of the pools add up.
* A pool without slots takes no part: a task in it has what it may have in any other, nothing.
* Few tasks: all deals are looked at, and the plan is the best there is. More: a bounded local search, from two deals.
  In one, tasks that have workers are where they are; the others, those that can achieve most first, go where the
  cluster gains most. The other is the best of those that begin with no task or with one somewhere, and go on so. From
  each, one task goes to another pool, while that is better: the one that helps most. Where none helps, two or three go
  together: the first that help.
* At most SOLVES_MAX problems are solved, fewer where they are large (WORK_MAX); the best deal until then is taken. So
  the plan is never worse than to leave every task in its pool, and it may miss the best one: by how much was measured
  (docs/design/planning.md#several-types-of-gpu).
* It depends on the problem alone: no clock, no chance. Of equally good deals the one that was found first is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import chain, combinations, product
from typing import TYPE_CHECKING, TypeAlias

from unicrond.core.planning.problem import Pool, Problem, TaskProblem

if TYPE_CHECKING:
    from unicrond.core.planning.solver import Solution

#: As many problems of single pools are solved for one plan, at most.
SOLVES_MAX = 400
#: As many deals are all looked at, where they take no more problems than that: 7 tasks of two types or of three.
ALL_MAX = 2500
#: Tasks times workers that all of them come to, at most; each task is placed once whatever it takes.
WORK_MAX = 100_000_000
#: As many tasks go to other pools together, where no single one helps.
TOGETHER = (2, 3)

#: Per task the place of its pool.
Deal: TypeAlias = tuple[int, ...]
#: What is minimised: unmet floors as in Solution.shortfall, then the objective, negative.
_Worth: TypeAlias = tuple[int, int, Fraction]
_Solve: TypeAlias = Callable[[Problem], "Solution"]


def best_of_pools(problem: Problem, solve: _Solve, all_max: int = ALL_MAX) -> Solution:
    """A good plan of a problem with several pools. `solve`: answers a problem without. `all_max`: see ALL_MAX."""
    search = _Search(problem, solve)
    pools, tasks = len(search.pools), len(problem.tasks)
    if pools**tasks <= all_max and pools * 2**tasks <= search.left:
        return search.plan(min(product(range(pools), repeat=tasks), key=search.worth))
    found = [search.descend(search.begin(search.present))]
    wanted = [{}, *({i: place} for i in range(tasks) for place in range(pools))]
    begun = [search.begin(first) for first in wanted if search.left >= pools * tasks]
    if begun:
        found.append(search.descend(min(begun, key=search.worth)))
    return search.plan(min(found, key=search.worth))


def confined(task: TaskProblem, gpu: str) -> tuple[TaskProblem, tuple[int, ...]]:
    """The task with its choices in one pool alone, and which of its layouts these are. On a type that is
    told its floor is met by the fewest workers that achieve anything: the type may have no room for fewer."""
    places = (0, *(n for n, other in enumerate(task.others, 1) if other.gpu == gpu))
    others = tuple(task.others[place - 1] for place in places[1:])
    inside = replace(task, others=others, max_workers=task.max_workers if task.gpu == gpu else 0)
    if not gpu or not task.floor or (floor := inside.least_that_achieves) == task.floor:
        return inside, places
    if floor is None:
        return replace(inside, others=(), max_workers=0), (0,)
    return replace(inside, floor=floor), places


class _Search:
    """One search: the pools' problems that were solved, and how many more may be."""

    def __init__(self, problem: Problem, solve: _Solve) -> None:
        self.problem, self.solve = problem, solve
        self.pools = tuple([pool for pool in problem.pools if pool.workers]) or problem.pools[:1]
        self.tasks = range(len(problem.tasks))
        self.known: dict[tuple[int, tuple[int, ...]], tuple[Solution, _Worth]] = {}
        self.left = min(SOLVES_MAX, WORK_MAX // max(1, len(problem.tasks) * problem.workers))
        place_of = {pool.gpu: place for place, pool in enumerate(self.pools)}
        at_work = [(i, place_of.get(task.gpu)) for i, task in enumerate(problem.tasks) if task.workers]
        self.present = {i: place for i, place in at_work if place is not None}
        self.inside = [[confined(task, pool.gpu) for task in problem.tasks] for pool in self.pools]

    def begin(self, first: Mapping[int, int]) -> Deal:
        """Some tasks are in given pools; each other goes where it fits best beside those before it."""
        at = dict(first)
        for i in sorted(self.tasks, key=self._eager):
            if i not in at:
                at[i] = min(range(len(self.pools)), key=lambda place: self._gained(at, i, place))
        return tuple([at[i] for i in self.tasks])

    def _eager(self, i: int) -> tuple[int, float, int]:
        """Turns first, then those that can achieve most."""
        task = self.problem.tasks[i]
        most = max(max(curve.points.values(), default=0) for curve in (task.curve, *(o.curve for o in task.others)))
        return -task.turn, -float(task.weight) * most, i

    def _gained(self, at: dict[int, int], i: int, place: int) -> _Worth:
        """What the pool is worth more with the task; a floor that is met nowhere else counts."""
        there = tuple(sorted(j for j, its in at.items() if its == place))
        with_it, without = self._pool(place, tuple(sorted((*there, i))))[1], self._pool(place, there)[1]
        return with_it[0] - without[0], with_it[1] - without[1], with_it[2] - without[2]

    def descend(self, deal: Deal) -> Deal:
        """From this deal to one that no single step makes better."""
        best = self.worth(deal)
        while (better := self.step(deal, best)) is not None:
            deal, best = better
        return deal

    def step(self, deal: Deal, best: _Worth) -> tuple[Deal, _Worth] | None:
        """A better deal, a few tasks away; None where none is found, or enough were tried."""
        single = [(self.worth(other), other) for other in _changed(deal, len(self.pools), 1) if self.left > 0]
        if single and min(single)[0] < best:
            worth, other = min(single)
            return other, worth
        for other in chain(*(_changed(deal, len(self.pools), count) for count in TOGETHER)):
            if self.left <= 0:
                break
            if (worth := self.worth(other)) < best:
                return other, worth
        return None

    def worth(self, deal: Deal) -> _Worth:
        """Of the whole deal."""
        high, floors, worth = 0, 0, Fraction(0)
        for place in range(len(self.pools)):
            one = self._pool(place, _of(deal, place))[1]
            high, floors, worth = high + one[0], floors + one[1], worth + one[2]
        return high, floors, worth

    def _pool(self, place: int, tasks: tuple[int, ...]) -> tuple[Solution, _Worth]:
        """The plan of a pool with these tasks, and what it is worth."""
        known = self.known.get((place, tasks))
        if known is None:
            self.left -= 1
            own = tuple([self.inside[place][i][0] for i in tasks])
            pool: Pool = self.pools[place]
            found = self.solve(replace(self.problem, workers=pool.workers, seats=pool.seats, tasks=own, pools=()))
            known = self.known[place, tasks] = found, (*found.shortfall, -found.exact_objective)
        return known

    def plan(self, deal: Deal) -> Solution:
        """The pools' plans as one."""
        workers, given, resolution = [0] * len(deal), [0] * len(deal), 0.0
        for place in range(len(self.pools)):
            tasks = _of(deal, place)
            found = self._pool(place, tasks)[0]
            resolution += found.resolution
            for i, count, layout in zip(tasks, found.workers, found.layouts, strict=True):
                workers[i], given[i] = count, self.inside[place][i][1][layout]
        kind = type(found)
        return kind(self.problem, tuple(workers), resolution, tuple(given))


def _of(deal: Deal, place: int) -> tuple[int, ...]:
    return tuple([i for i, its in enumerate(deal) if its == place])


def _changed(deal: Deal, pools: int, count: int) -> Iterator[Deal]:
    """All deals that differ in so many tasks."""
    for tasks in combinations(range(len(deal)), count):
        for there in product(range(pools), repeat=count):
            if all(deal[i] != place for i, place in zip(tasks, there, strict=True)):
                other = list(deal)
                for i, place in zip(tasks, there, strict=True):
                    other[i] = place
                yield tuple(other)
