"""The exact solver: a multiple-choice knapsack by dynamic programming.

The rules
---------
* *Gains become integers.* G is shifted by the constant that every choice of the task pays (its
  transition), so that a choice is worth F(t, x') * D_running, plus, for a healthy task that stays,
  F(t, x) * (D_transition + D_churn). That is divided by a power of two, the quantum, and rounded: all
  sums stay below 2**53, hence exact in float64, associative, and the same in any order of the tasks.
  The plan's objective is then below the true optimum by at most `Scale.resolution`.
* *Useful points only.* A choice with more workers and no more gain than another is never needed; the
  present number of workers always stays in, for the ties' sake.
* *Floors.* Which floors are met is decided beforehand (`floors.py`); these are hard limits, the others none.
* *Layouts.* What a layout costs depends on the task alone, so each number of workers takes the best of its layouts
  before tasks are weighed against each other.
* *Ties.* From the first task to the last: its present number of workers if some optimal plan has that,
  else the smallest number that some optimal plan has; its present layout if that is as good for this number, else the
  one that achieves most, the first of equals. This defines exactly one plan, however it is computed.
* *Pools.* Of several types of GPU each task gets one (`pools.py`), and each pool is planned by the rules above.
* *Residents.* Beside closed nodes the sums are of open seats: a choice weighs those that it needs. So many choices of a
  task weigh nothing, and the best of them is left (`points.beside_residents`).
* *Seats.* A plan whose tensor-parallel groups find no room is excluded, and the next best is searched
  (`feasibility.py`).

    S_i(j) = max_k v_i(k) + S_{i+1}(j - seats_i(k))       best of tasks i.. with at most j open seats; S_{m+1} = 0

Not part of this module: time (the caller measures), the one-step table (`table.py`), arrays (`points.py`).
"""

from __future__ import annotations

import numpy as np

from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning.feasibility import best_with_room, has_room
from unicrond.core.planning.floors import problem_floors
from unicrond.core.planning.points import Points, Scale, beside_residents, bounds, outline_of, scale, useful
from unicrond.core.planning.pools import best_of_pools
from unicrond.core.planning.problem import Problem, ProblemError
from unicrond.core.planning.solution import Solution

#: Rows larger than this are refused rather than tried.
MOST_BYTES = 4 * 2**30


def solve(problem: Problem) -> Solution:
    """Return the canonical optimal plan of those that have room; of several pools a plan as pools.py has it.

    Raise ProblemError if the gains are beyond float64, or the rows beyond 4 GiB.
    """
    if problem.pools:
        return best_of_pools(problem, solve)
    best = _solve_sums(problem)
    return best if has_room(best) else best_with_room(best, _solve_sums)


def _solve_sums(problem: Problem) -> Solution:
    """Return the canonical optimal plan of those whose open seats add up."""
    points, by, grain = choices_of(problem)
    if problem.closed:
        points, counts, grain = beside_residents(points, grain, problem)
    most = sum(points.workers[points.starts[1:] - 1].tolist())  # more than that brings nothing
    shape = (len(problem.tasks) + 1, min(problem.open_workers // grain, most) + 1)
    if shape[0] * shape[1] * 8 > MOST_BYTES:
        size = f"n' = {problem.workers} among {len(problem.tasks)} tasks takes more than 4 GiB"
        raise ProblemError(f"{size}; plan for nodes, not workers")
    rows = np.empty(shape)
    rows[-1] = 0.0
    compute = kernel.active()
    compute.suffix(points.workers, points.values, points.starts, rows, len(problem.tasks))
    plan = compute.read_back(points.workers, points.values, points.starts, points.stay, rows)
    workers = counts[points.places(plan)] if problem.closed else plan * grain
    return Solution(problem, tuple(workers.tolist()), by.resolution(len(problem.tasks)))


def choices_of(problem: Problem) -> tuple[Points, Scale, int]:
    """Return the problem's useful points, their scale, and the workers in one grain."""
    tasks, d_running = outline_of(problem), float(problem.d_running_us)
    by = scale(tasks, bounds(tasks, problem.workers, d_running))
    forms = np.array([int(task.faulty) for task in problem.tasks], dtype=np.int64)
    floors = problem_floors(problem)
    return useful(tasks, forms, floors, problem.workers, d_running, by), by, tasks.grain
