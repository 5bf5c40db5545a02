"""With several types of GPU: the plans of the next events, solved one by one while the cluster is idle.

Rules
-----
* Assignments to pools share no rows, so each event costs a whole plan (`pools.py`). The likeliest AHEAD_MAX are solved:
  the loss of each node (once for nodes that are alike, those with the most slots in total first), a node that joins,
  the end of each task, the loss of each task's worker.
* A plan is stored under its problem, and answers that very problem alone (`PlanTable.ahead`).
* A caller that needs the processor ends a solve between two pools' problems (`interruptible`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from unicrond.core.planning.pools import best_of_pools
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.situation import NextEvent, NodeArrival, NodeLoss, Situation, TaskEnd
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import PlanTable

#: The most events that are planned for.
AHEAD_MAX = 48


class InterruptedSolve(Exception):
    """A solve that was ended because another problem is to be solved now."""


def likeliest(situation: Situation, most: int = AHEAD_MAX) -> list[NextEvent]:
    """Return the events that are planned for, the likeliest first; at most `most`."""
    slots = Counter[object]()
    for node in situation.nodes:
        slots[node.load] += node.slots
    kinds = (NodeLoss, NodeArrival, TaskEnd)

    def rank(event: NextEvent) -> tuple[int, int]:
        """Return the sort key of an event: its kind, then for lost nodes the slots of all nodes alike, most first."""
        kind = next((n for n, kind in enumerate(kinds) if isinstance(event, kind)), len(kinds))
        return kind, -slots[situation.load_of[event.node].load] if isinstance(event, NodeLoss) else 0

    return sorted(situation.expected(distinct=True), key=rank)[:most]


def interruptible(problem: Problem, is_asked: Callable[[], bool]) -> Solution:
    """Solve a problem with several pools, as `solver.solve` does. Raise InterruptedSolve as soon as `is_asked` returns
    True."""

    def solve_unless_asked(pool: Problem) -> Solution:
        """Solve one pool's problem, unless the caller wants the thread back."""
        if is_asked():
            raise InterruptedSolve
        return solve(pool)

    return best_of_pools(problem, solve_unless_asked)


def fill(table: PlanTable, most: int = AHEAD_MAX) -> PlanTable:
    """Solve the plans that are made ahead, `most` of them; add them to the table and return it. It takes as long."""
    for event in likeliest(table.situation, most) if table.situation.gpus else ():
        problem = table.situation.after(event)
        table.ahead[problem] = solve(problem)
    return table
