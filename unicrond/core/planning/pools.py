"""Several types of GPU: the assignment of tasks to types, and the exact plan of each type's nodes.

Rules
-----
* A *pool* is all nodes of one type. A task has all its workers in one pool, so an assignment of the tasks to the pools
  leaves one problem for each pool, which `solver.solve` answers exactly. The worth of a pool depends on its own tasks
  alone: unmet floors and objectives of the pools add up.
* A pool without slots takes no part: a task gets nothing there, which it may have in any other pool.
* With few tasks all assignments are tried, and the plan is the best there is. With more, a bounded local search starts
  from two assignments. In the first, tasks that have workers stay in their pools; the others, those that can achieve
  most first, go where the cluster gains most. The second is the best of those that begin with no task, or with one task
  in some pool, and continue in the same way. From each, the one task that helps most goes to another pool, while that
  is better. Where none helps, two or three go together: the first combination that helps.
* At most SOLVES_MAX problems are solved, fewer where they are large (WORK_MAX); the best assignment until then counts.
  So the plan is never worse than one that leaves every task in its pool, and it may miss the best one: the loss was
  measured (docs/design/planning.md#several-types-of-gpu).
* The plan depends on the problem alone: no clock, no chance. Of equally good assignments the first one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import chain, combinations, product
from typing import TypeAlias

from unicrond.core.planning.floors import problem_values, with_floor_worths
from unicrond.core.planning.problem import Pool, Problem, TaskProblem
from unicrond.core.planning.solution import Solution

#: The most problems of single pools that are solved for one plan.
SOLVES_MAX = 400
#: Up to so many assignments, all are tried, if that takes no more problems: 7 tasks of two types or of three.
ALL_MAX = 2500
#: The most tasks times workers of all these problems together; each task is placed once in any case.
WORK_MAX = 100_000_000
#: How many tasks go to other pools together, where no single one helps.
TOGETHER = (2, 3)

#: Per task the index of its pool.
PoolAssignment: TypeAlias = tuple[int, ...]
#: The key to minimise: the values of the unmet floors, as in Solution.shortfall; then the objective, negative.
_Worth: TypeAlias = tuple[int, Fraction]
_Solve: TypeAlias = Callable[[Problem], Solution]


def best_of_pools(problem: Problem, solve: _Solve, all_max: int = ALL_MAX) -> Solution:
    """Return a good plan of a problem with several pools. `solve` solves a problem without pools. `all_max`: see
    ALL_MAX."""
    search = _Search(problem, solve)
    pools, tasks = len(search.pools), len(problem.tasks)
    if pools**tasks <= all_max and pools * 2**tasks <= search.budget:
        return search.plan(min(product(range(pools), repeat=tasks), key=search.worth))
    candidates = [search.descend(search.begin(search.present))]
    openings = [{}, *({i: place} for i in range(tasks) for place in range(pools))]
    assignments = [search.begin(first) for first in openings if search.budget >= pools * tasks]
    if assignments:
        candidates.append(search.descend(min(assignments, key=search.worth)))
    return search.plan(min(candidates, key=search.worth))


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
    """One search: the solved problems of the pools, and the budget of further ones."""

    def __init__(self, problem: Problem, solve: _Solve) -> None:
        self.problem, self.solve = problem, solve
        self.pools = tuple([pool for pool in problem.pools if pool.workers]) or problem.pools[:1]
        self.tasks = range(len(problem.tasks))
        self.solutions: dict[tuple[int, tuple[int, ...]], tuple[Solution, _Worth]] = {}
        self.budget = min(SOLVES_MAX, WORK_MAX // max(1, len(problem.tasks) * problem.workers))
        place_of = {pool.gpu: place for place, pool in enumerate(self.pools)}
        at_work = [(i, place_of.get(task.gpu)) for i, task in enumerate(problem.tasks) if task.workers]
        self.present = {i: place for i, place in at_work if place is not None}
        self.values = problem_values(problem)
        problem = with_floor_worths(problem)
        self.inside = [[confined(task, pool.gpu) for task in problem.tasks] for pool in self.pools]

    def begin(self, first: Mapping[int, int]) -> PoolAssignment:
        """Return an assignment in which the tasks of `first` are in their pools, and each other task is where it fits
        best beside those before it."""
        place_of = dict(first)
        for i in sorted(self.tasks, key=self._priority):
            if i not in place_of:
                place_of[i] = min(range(len(self.pools)), key=lambda place: self._gain_of_pool(place_of, i, place))
        return tuple([place_of[i] for i in self.tasks])

    def _priority(self, i: int) -> tuple[bool, int, int, float, int]:
        """Return the sort key of a task: higher classes first, then turns, then the tasks that can achieve most."""
        task = self.problem.tasks[i]
        most = max(
            max(curve.points.values(), default=0)
            for curve in (task.curve, *(option.curve for option in task.alternatives))
        )
        return task.preemptible, -task.priority, -task.turn, -float(task.weight) * most, i

    def _gain_of_pool(self, place_of: dict[int, int], i: int, place: int) -> _Worth:
        """Return how much better the pool's plan becomes with the task; a floor that is met nowhere else counts."""
        members = tuple(sorted(j for j, its in place_of.items() if its == place))
        with_it, without = self._pool(place, tuple(sorted((*members, i))))[1], self._pool(place, members)[1]
        return with_it[0] - without[0], with_it[1] - without[1]

    def descend(self, assignment: PoolAssignment) -> PoolAssignment:
        """Return the assignment that is reached from this one once no single step improves it."""
        best = self.worth(assignment)
        while (better := self.step(assignment, best)) is not None:
            assignment, best = better
        return assignment

    def step(self, assignment: PoolAssignment, best: _Worth) -> tuple[PoolAssignment, _Worth] | None:
        """Return a better assignment that differs in a few tasks; None if none is found or the budget is spent."""
        neighbours = [
            (self.worth(neighbour), neighbour)
            for neighbour in _neighbours(assignment, len(self.pools), 1)
            if self.budget > 0
        ]
        if neighbours and min(neighbours)[0] < best:
            worth, neighbour = min(neighbours)
            return neighbour, worth
        for neighbour in chain(*(_neighbours(assignment, len(self.pools), count) for count in TOGETHER)):
            if self.budget <= 0:
                break
            if (worth := self.worth(neighbour)) < best:
                return neighbour, worth
        return None

    def worth(self, assignment: PoolAssignment) -> _Worth:
        """Return the worth of the whole assignment."""
        worths = [self._pool(place, _tasks_in(assignment, place))[1] for place in range(len(self.pools))]
        return sum(missed for missed, _ in worths), sum((gain for _, gain in worths), Fraction(0))

    def _pool(self, place: int, tasks: tuple[int, ...]) -> tuple[Solution, _Worth]:
        """Return the plan of a pool with these tasks, and its worth."""
        entry = self.solutions.get((place, tasks))
        if entry is None:
            self.budget -= 1
            pool_tasks = tuple([self.inside[place][i][0] for i in tasks])
            pool: Pool = self.pools[place]
            solution = self.solve(
                replace(
                    self.problem,
                    workers=pool.workers,
                    seats=pool.seats,
                    closed=pool.closed,
                    tasks=pool_tasks,
                    pools=(),
                )
            )
            counts = zip(tasks, pool_tasks, solution.workers, strict=True)
            missed = sum(self.values[i] for i, task, workers in counts if workers < task.floor)
            entry = self.solutions[place, tasks] = solution, (missed, -solution.exact_objective)
        return entry

    def plan(self, assignment: PoolAssignment) -> Solution:
        """Join the plans of the pools into one."""
        workers, layouts, resolution = [0] * len(assignment), [0] * len(assignment), 0.0
        for place in range(len(self.pools)):
            tasks = _tasks_in(assignment, place)
            solution = self._pool(place, tasks)[0]
            resolution += solution.resolution
            for i, count, layout in zip(tasks, solution.workers, solution.layouts, strict=True):
                workers[i], layouts[i] = count, self.inside[place][i][1][layout]
        return Solution(self.problem, tuple(workers), resolution, tuple(layouts))


def _tasks_in(assignment: PoolAssignment, place: int) -> tuple[int, ...]:
    return tuple([i for i, its in enumerate(assignment) if its == place])


def _neighbours(assignment: PoolAssignment, pools: int, count: int) -> Iterator[PoolAssignment]:
    """Yield all assignments that differ in `count` tasks."""
    for tasks in combinations(range(len(assignment)), count):
        for places in product(range(pools), repeat=count):
            if all(assignment[i] != place for i, place in zip(tasks, places, strict=True)):
                neighbour = list(assignment)
                for i, place in zip(tasks, places, strict=True):
                    neighbour[i] = place
                yield tuple(neighbour)
