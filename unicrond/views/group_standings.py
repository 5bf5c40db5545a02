"""Which ranks held the others of their replica up, as the stacks of an incident tell it (StacksTaken), in lines.

A replica's workers may be of several nodes, each of which tells its own: lines are made of all that has come.
"""

from __future__ import annotations

from unicrond.core.faults.flight_recorders import attribute, attribution_text
from unicrond.core.state.state import Task
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.stacks import Standings


class GroupStandings:
    """The standings of the workers of one group, by replica. `task`: as it was when the group hung."""

    def __init__(self, task: Task | None) -> None:
        self._workers = dict(task.workers) if task is not None else {}
        self._standings: dict[int, dict[int, Standings]] = {}

    def add(self, event: v.StacksTaken) -> None:
        """Add what one node has told."""
        for stack in event.workers:
            if stack.standings and (worker := self._workers.get(stack.worker)) is not None:
                self._standings.setdefault(worker.replica, {})[worker.shard] = stack.standings

    def lines(self) -> list[str]:
        """Say of each replica which of its ranks held it up, and their workers; nothing where none is named."""
        lines = []
        for replica, standings in sorted(self._standings.items()):
            attribution = attribute(standings)
            ranks = {*attribution.ranks, *attribution.silent}
            workers = [
                name for name, worker in self._workers.items() if worker.replica == replica and worker.shard in ranks
            ]
            if text := attribution_text(attribution):
                lines.append(f"in replica {replica} {text}: {', '.join(workers)}")
        return lines


NO_STANDINGS = GroupStandings(None)
