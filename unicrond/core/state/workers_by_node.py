"""Which workers are on which node: what is asked when a node is lost, a command answered, a slot looked for.

Rules
-----
* It follows from the tasks, and is brought up to date at the cost of the workers that came or went since the last time.
* The order is that of the names, and not of when somebody looked: a reader that looked after each entry and one that
  folded many at once find the same worker first.
* A worker never moves to another node: its id belongs to one (admission.py refuses what says otherwise).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import immutables

from unicrond.core.state.ordered_map import changed, in_order, same_names


class _PlacedWorker(Protocol):
    @property
    def worker(self) -> str:
        """Return the worker's id."""

    @property
    def node(self) -> str:
        """Return the node that it runs on."""


class _PlacedTask(Protocol):
    @property
    def workers(self) -> Mapping[str, _PlacedWorker]:
        """Return the task's workers by id."""


class ByNode:
    """The workers of `tasks` by their node; `before`: the same of other tasks, from which it differs little."""

    __slots__ = ("_on", "tasks")

    def __init__(self, tasks: Mapping[str, _PlacedTask], before: ByNode | None = None) -> None:
        self.tasks = tasks
        self._on: immutables.Map[str, tuple[tuple[str, str], ...]] = before._on if before else immutables.Map()
        previous = before.tasks if before else {}
        moves: dict[str, list[tuple[str, str, bool]]] = {}
        for name, (was, now) in changed(previous, tasks).items():
            old, new = was.workers if was else {}, now.workers if now else {}
            if same_names(old, new):
                continue
            for old_worker, new_worker in changed(old, new).values():
                if old_worker is not None and (new_worker is None or new_worker.node != old_worker.node):
                    moves.setdefault(old_worker.node, []).append((name, old_worker.worker, False))
                if new_worker is not None and (old_worker is None or new_worker.node != old_worker.node):
                    moves.setdefault(new_worker.node, []).append((name, new_worker.worker, True))
        on = self._on.mutate()
        for node, node_moves in moves.items():
            entries = dict.fromkeys(on.get(node, ()))
            for task, worker, is_arrival in node_moves:
                if is_arrival:
                    entries[task, worker] = None
                else:
                    entries.pop((task, worker), None)
            on[node] = tuple(sorted(entries))
        self._on = on.finish()

    def on(self, node: str) -> Sequence[tuple[str, str]]:
        """Return (task, worker) of each worker of any status on `node`, by name."""
        return self._on.get(node, ())

    def of_task(self, node: str, task: str) -> list[str]:
        """Return the ids of the task's workers on `node`, in their order among all of the task's."""
        workers = [worker for name, worker in self.on(node) if name == task]
        if len(workers) < 2:
            return workers
        return in_order(self.tasks[task].workers, workers)

    def __eq__(self, _: object) -> bool:
        """Say that it equals any other: it follows from the rest of its state, which is compared anyway."""
        return True

    def __repr__(self) -> str:
        return "None"  # as where it has not been computed yet

    __hash__ = None  # type: ignore[assignment]
