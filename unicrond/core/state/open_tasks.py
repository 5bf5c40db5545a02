"""Which tasks something may be left to do for: what is asked with every decision, though most tasks have ended.

Rules
-----
* A task is open while it is active, a worker of it is there, or nodes hold something of it: its states in their memory,
  or a fault that its program had on one node alone. Nothing else of an ended task is looked at when something is
  decided; it stays in the state all the same, for its name, its worker ids, and people.
* It follows from the tasks, and is brought up to date at the cost of those that have changed since the last time.
* The order is that of the tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from unicrond.core.state.ordered_map import changed, in_order


class _OpenTask(Protocol):
    @property
    def is_open(self) -> bool:
        """Return whether something may be left to do for it."""


class OpenTasks:
    """Hold the names of the open ones of `tasks`, in order; `before`: the same of other tasks, from which it differs
    little."""

    __slots__ = ("names", "tasks")

    def __init__(self, tasks: Mapping[str, _OpenTask], before: OpenTasks | None = None) -> None:
        self.tasks: Mapping[str, Any] = tasks
        if before is None:
            self.names = tuple([name for name, task in tasks.items() if task.is_open])
            return
        names = dict.fromkeys(before.names)
        arrivals = []
        for name, (_, task) in changed(before.tasks, tasks).items():
            if task is None or not task.is_open:
                names.pop(name, None)
            elif name not in names:
                arrivals.append(name)
        self.names = tuple(in_order(tasks, [*names, *arrivals]) if arrivals else names)

    def __eq__(self, _: object) -> bool:
        """Say that it equals any other: it follows from the rest of its state, which is compared anyway."""
        return True

    def __repr__(self) -> str:
        return "None"  # as where it has not been computed yet

    __hash__ = None  # type: ignore[assignment]
