"""Several types of GPU: the deal of tasks to types, and the exact plan of each type's nodes.

Rules
-----
* A *pool* is all nodes of one type. A task has all its workers in one pool, so a *deal* of the tasks to the pools
  leaves one problem for each pool, which `solver.solve` answers exactly. The worth of a pool depends on its own tasks
  alone: unmet floors and objectives of the pools add up.
* A pool without slots takes no part: a task gets nothing there, which it may have in any other pool.
* Which floors are met, over all pools, is decided first (`floors.place_floors`); a deal in which these do not fit is
  none.
* At any prices of the pools' seats a deal has a bound (`pool_prices.py`): what all tasks have at these prices in their
  best pools, less each task's *regret* of the pool that it is dealt to. Of many prices the lowest bound counts.
* Two deals are solved before all others: tasks that have workers stay where they are; each task whose floor is met is
  where it was placed for that. All else is in the pool that it regrets least.
* Then deals follow, the highest bound first. Where the next bound is no more than what the best deal has, that is
  proven to be best. A deal that the best prices for each pool alone rule out is not solved.
* A task that gets nothing at the best prices, and has no floor that is met, is a member of all pools at first. Where
  several give it workers, deals with it in each one follow.
* At most SOLVES_MAX problems of pools are solved, fewer where they are large (WORK_MAX), and LOOKS_MAX deals looked at,
  STEPS_MAX with those of some tasks. The best until then counts, and `Solution.gap` says how much better another may
  be.
* The plan depends on the problem alone, not on a clock or chance, and its worth not on the order of the tasks. Of
  equally good deals the first that was solved counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from heapq import heappop, heappush
from math import fsum, inf
from typing import TypeAlias

import numpy as np

from unicrond.core.planning.floors import place_floors, problem_values, with_floor_worths
from unicrond.core.planning.pool_prices import Floats, PoolPrices, best_prices, offers_of
from unicrond.core.planning.problem import Problem, TaskProblem
from unicrond.core.planning.solution import Solution

#: The most problems of single pools that are solved for one plan.
SOLVES_MAX = 400
#: The most tasks times workers of all these problems together, after the first two deals.
WORK_MAX = 20_000_000
#: The most deals of some of the tasks, or all, that are looked at.
STEPS_MAX = 20_000
#: The most deals of all tasks that are looked at.
LOOKS_MAX = 2000
#: Gains are rounded: objectives that differ by a smaller share of their bound are equal.
EQUAL_SHARE = 1e-12

#: The pool of a task for which none is decided yet.
ANY = -1
#: Per task the index of its pool.
Deal: TypeAlias = tuple[int, ...]
#: The key to minimise: the values of the unmet floors, as in Solution.shortfall; then the objective, negative.
_Worth: TypeAlias = tuple[int, Fraction]
_Solve: TypeAlias = Callable[[Problem], Solution]


def best_of_pools(problem: Problem, solve: _Solve) -> Solution:
    """Return a plan of a problem with several pools, with how much better another may be. `solve` solves a problem
    without pools."""
    return _Search(problem, solve).best()


def confined(task: TaskProblem, gpu: str) -> tuple[TaskProblem, tuple[int, ...]]:
    """Return the task with its choices in one pool alone, and the numbers of these layouts. On a named type its floor
    is met by the fewest workers that achieve anything: the type may have no room for fewer."""
    places = (0, *(n for n, option in enumerate(task.alternatives, 1) if option.gpu == gpu))
    alternatives = tuple(task.alternatives[place - 1] for place in places[1:])
    if task.gpu == gpu:
        inside = replace(task, alternatives=alternatives)
    else:
        inside = replace(task, alternatives=alternatives, max_workers=0, residents=())
    if not gpu or not task.floor or (floor := inside.least_that_achieves) == task.floor:
        return inside, places
    if floor is None:
        return replace(inside, alternatives=(), max_workers=0), (0,)
    return replace(inside, floor=floor), places


class _Search:
    """One search: the solved problems of the pools, the best deal, and the budget of further ones."""

    def __init__(self, problem: Problem, solve: _Solve) -> None:
        self.problem, self.solve = problem, solve
        self.pools = tuple([pool for pool in problem.pools if pool.workers]) or problem.pools[:1]
        self.places, self.tasks = range(len(self.pools)), range(len(problem.tasks))
        self.seats = [pool.workers - pool.closed for pool in self.pools]
        self.values = problem_values(problem)
        pinned = with_floor_worths(problem)
        self.inside = [[confined(task, pool.gpu) for task in pinned.tasks] for pool in self.pools]
        self.solutions: dict[tuple[int, Deal], tuple[Solution, _Worth]] = {}
        self.budget = min(SOLVES_MAX, WORK_MAX * len(self.pools) // max(1, len(problem.tasks) * problem.workers))
        self.looks = 0
        self.shifts = [float(_shift(problem, task)) for task in problem.tasks]
        self.shift = fsum(self.shifts)
        self.deal: Deal = ()
        self.missed_least, self.lead = 0, -inf

    def best(self) -> Solution:
        """Return the best plan that is found."""
        if len(self.pools) < 2 or not self.tasks:
            self.deal = (0,) * len(self.tasks)
            return self._plan(0.0)
        seats_of = [[self._floor_seats(place, i) for place in self.places] for i in self.tasks]
        place_of_floor, is_sure = place_floors(seats_of, self.values, self.seats)
        self.missed_least = sum(self.values) - sum([self.values[i] for i in place_of_floor])
        prices = self._prices(seats_of, place_of_floor)
        likely = [min(self.places, key=lambda place: (prices.nearest[i, place], place)) for i in self.tasks]
        place_of = {pool.gpu: place for place, pool in enumerate(self.pools)}
        present = [place_of.get(task.gpu) if task.workers else None for task in self.problem.tasks]
        self._take(tuple([likely[i] if place is None else place for i, place in enumerate(present)]), prices)
        self._take(tuple([place_of_floor.get(i, likely[i]) for i in self.tasks]), prices)
        floors = [[(seats or 0) if i in place_of_floor else 0 for seats in seats_of[i]] for i in self.tasks]
        bound = self._improve(prices, floors) - self.shift
        unmet, objective = self.worth(self.deal)
        if unmet > self.missed_least or not is_sure:
            return self._plan(1.0)
        more = max(0.0, bound + float(objective))
        return self._plan(min(1.0, more / abs(float(objective))) if objective else float(more > 0))

    def _improve(self, prices: PoolPrices, floors: Sequence[Sequence[int]]) -> float:
        """Solve deals until the best one is proven, or the budget ends; return a bound of all other deals."""
        names, nearest = [task.name for task in self.problem.tasks], prices.nearest
        order = sorted(self.tasks, key=lambda i: (-max(floors[i]), -sorted(nearest[i])[1], names[i]))
        options = [
            [(ANY, 0, np.zeros_like(prices.bounds))]
            if prices.is_idle[i] and not max(floors[i])
            else [
                (place, floors[i][place], prices.regrets[i, place]) for place in self.places if nearest[i, place] < inf
            ]
            for i in order
        ]
        for bound, places in self._highest(options, prices.bounds):
            place_of = dict(zip(order, places, strict=False))
            if not places or not self._settle(tuple([place_of[i] for i in self.tasks]), prices):
                return bound
        return -inf

    def _highest(
        self, options: Sequence[Sequence[tuple[int, int, Floats]]], bounds: Floats
    ) -> Iterator[tuple[float, Deal]]:
        """Yield the deals in which the floors fit and whose bound is above the lead, with their bounds, the highest
        first; after STEPS_MAX steps the highest bound of all others, and no deal.

        `options`: per task (pool, seats of its floor, regrets); `bounds`: of all deals, at the same prices.
        """
        heap: list[tuple[float, int, int, Deal, tuple[int, ...], Floats]] = []
        heappush(heap, (-float(bounds.min()), 0, 0, (), tuple(self.seats), bounds))
        pushes = 0
        for _ in range(STEPS_MAX):
            if not heap or -heap[0][0] <= self.lead:
                return
            negative, _, _, deal, free, bounds = heappop(heap)
            if len(deal) == len(options):
                yield -negative, deal
                continue
            for place, floor, regrets in options[len(deal)]:
                below = bounds - regrets
                if floor <= free[place] and (bound := float(below.min())) > self.lead:
                    pushes += 1
                    after = (*free[:place], free[place] - floor, *free[place + 1 :]) if floor else free
                    heappush(heap, (-bound, -len(deal), pushes, (*deal, place), after, below))
        if heap:
            yield -heap[0][0], ()

    def _settle(self, deal: Deal, prices: PoolPrices) -> bool:
        """Solve a deal with the tasks of ANY pool in all of them; where several use one, with it in each. Return False
        where the budget ended before."""
        deals = [deal]
        while deals:
            if self.budget <= 0 or self.looks >= LOOKS_MAX:
                return False
            self.looks += 1
            deal = deals.pop()
            members = [_tasks_in(deal, place) for place in self.places]
            # Each pool counts what a task of ANY pool has there without a seat, and takes its shift from the objective.
            idle = [i for i, place in enumerate(deal) if place == ANY]
            twice = fsum(prices.besides[idle].tolist())
            shift = self.shift + (len(self.pools) - 1) * fsum([self.shifts[i] for i in idle])
            if prices.apart(members) - twice <= self.lead:
                continue
            solutions = [self._pool(place, tasks)[0] for place, tasks in enumerate(members)]
            if fsum([shift - twice, *[solution.objective for solution in solutions]]) <= self.lead:
                continue
            users: dict[int, list[int]] = {}
            for place, (tasks, solution) in enumerate(zip(members, solutions, strict=True)):
                for i, workers in zip(tasks, solution.workers, strict=True):
                    if workers and deal[i] == ANY:
                        users.setdefault(i, []).append(place)
            if conflicts := [i for i, places in users.items() if len(places) > 1]:
                i = min(conflicts, key=lambda i: self.problem.tasks[i].name)
                deals += [(*deal[:i], place, *deal[i + 1 :]) for place in self.places]
            else:
                final = [users.get(i, [0])[0] if place == ANY else place for i, place in enumerate(deal)]
                self._take(tuple(final), prices)
        return True

    def _take(self, deal: Deal, prices: PoolPrices) -> None:
        """Solve a deal, and keep it if it is the best so far."""
        if not self.deal or self.worth(deal) < self.worth(self.deal):
            self.deal = deal
        unmet, objective = self.worth(self.deal)
        if unmet <= self.missed_least:
            self.lead = self.shift - float(objective) + EQUAL_SHARE * (abs(prices.lowest) + abs(self.shift))

    def _floor_seats(self, place: int, i: int) -> int | None:
        """Return the open seats that the task's floor needs in a pool; None if it cannot be met there."""
        task, pool = self.inside[place][i][0], self.pools[place]
        seats = task.open_seats(task.floor_point)
        return seats if 0 < task.floor_point <= pool.workers and seats <= self.seats[place] else None

    def _prices(self, seats_of: Sequence[Sequence[int | None]], place_of_floor: Mapping[int, int]) -> PoolPrices:
        """Return the prices of the pools where these floors are met."""
        offers = []
        for place in self.places:
            floors = [self.inside[place][i][0].floor_point if i in place_of_floor else 0 for i in self.tasks]
            is_open = [i not in place_of_floor or seats_of[i][place] is not None for i in self.tasks]
            offers.append(offers_of(self._problem_of(place, tuple(self.tasks)), floors, is_open))
        return best_prices(offers, [place_of_floor.get(i, 0) for i in self.tasks])

    def worth(self, deal: Deal) -> _Worth:
        """Return the worth of the whole deal."""
        worths = [self._pool(place, _tasks_in(deal, place))[1] for place in self.places]
        return sum(missed for missed, _ in worths), sum((gain for _, gain in worths), Fraction(0))

    def _problem_of(self, place: int, tasks: Deal) -> Problem:
        """Return the problem of a pool with these tasks."""
        pool, inside = self.pools[place], tuple([self.inside[place][i][0] for i in tasks])
        return replace(self.problem, workers=pool.workers, seats=pool.seats, closed=pool.closed, tasks=inside, pools=())

    def _pool(self, place: int, tasks: Deal) -> tuple[Solution, _Worth]:
        """Return the plan of a pool with these tasks, and its worth."""
        entry = self.solutions.get((place, tasks))
        if entry is None:
            self.budget -= 1
            solution = self.solve(self._problem_of(place, tasks))
            counts = zip(tasks, solution, strict=True)
            missed = sum([self.values[i] for i, (task, workers) in counts if workers < task.floor])
            entry = self.solutions[place, tasks] = solution, (missed, -solution.exact_objective)
        return entry

    def _plan(self, gap: float) -> Solution:
        """Join the plans of the pools into one."""
        workers, layouts, resolution = [0] * len(self.deal), [0] * len(self.deal), 0.0
        for place in self.places:
            tasks = _tasks_in(self.deal, place)
            solution = self._pool(place, tasks)[0]
            resolution += solution.resolution
            for i, count, layout in zip(tasks, solution.workers, solution.layouts, strict=True):
                workers[i], layouts[i] = count, self.inside[place][i][1][layout]
        return Solution(self.problem, tuple(workers), resolution, tuple(layouts), gap)


def _tasks_in(deal: Deal, place: int) -> tuple[int, ...]:
    return tuple([i for i, its in enumerate(deal) if its in (place, ANY)])


def _shift(problem: Problem, task: TaskProblem) -> Fraction:
    """Return what every choice of the task pays: values in points.py are gains beyond it."""
    transition = problem.transition_of(task)
    move = Fraction(task.prices.over(transition)[0]) + Fraction(problem.churn_us)
    return task.waf(task.workers) * (Fraction(transition) if task.faulty else move)
