"""With several types of GPU: the plans of the next events, solved one by one while nothing happens.

Rules
-----
* Deals share no rows, so each event costs a whole plan (`pools.py`). The likeliest AHEAD_MAX are solved: the loss of
  each node (of nodes alike one, by the slots that they have together), a node that joins, the end of each task, the
  loss of each task's worker.
* A plan is kept with its problem, and is the answer to that very problem alone (`Table.ahead`).
* Whoever needs the processor ends a solve between two pools' problems (`interruptible`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from unicrond.core.planning.pools import best_of_pools
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.situation import NextEvent, NodeJoined, NodeLost, Situation, TaskFinished
from unicrond.core.planning.solver import Solution, solve
from unicrond.core.planning.table import Table

#: As many events are planned for, at most.
AHEAD_MAX = 48


class InterruptedSolve(Exception):
    """Something else is to be solved now."""


def likeliest(situation: Situation) -> list[NextEvent]:
    """The events that are planned for, in this order."""
    slots = Counter[object]()
    for node in situation.nodes:
        slots[node.load] += node.slots
    kinds = (NodeLost, NodeJoined, TaskFinished)

    def rank(event: NextEvent) -> tuple[int, int]:
        kind = next((n for n, kind in enumerate(kinds) if isinstance(event, kind)), len(kinds))
        return kind, -slots[situation.load_of[event.node].load] if isinstance(event, NodeLost) else 0

    return sorted(situation.expected(distinct=True), key=rank)[:AHEAD_MAX]


def interruptible(problem: Problem, is_asked: Callable[[], bool]) -> Solution:
    """`solver.solve` of a problem with several pools. Raises InterruptedSolve as soon as `is_asked` says so."""

    def one(pool: Problem) -> Solution:
        if is_asked():
            raise InterruptedSolve
        return solve(pool)

    return best_of_pools(problem, one)


def fill(table: Table) -> Table:
    """The table with all plans that are made ahead. Takes as long as they do."""
    for event in likeliest(table.situation) if table.situation.gpus else ():
        problem = table.situation.after(event)
        table.ahead[problem] = solve(problem)
    return table
