"""Selection of entries by type, node and task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry, QuarantinedMessage

QUARANTINED = "QuarantinedMessage"
TYPE_NAMES: tuple[str, ...] = (*sorted(kind.__name__ for kind in get_args(v.AnyEvent)), QUARANTINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A selection of entries; empty fields do not select. `types`: of TYPE_NAMES; any of them. Node and task: named
    anywhere in the event."""

    types: frozenset[str] = frozenset()
    node: str = ""
    task: str = ""

    def takes(self, entry: Entry) -> bool:
        """Say whether the entry is selected. Of a quarantined message nothing but its type is believed."""
        if isinstance(entry, QuarantinedMessage):
            return not (self.node or self.task) and (not self.types or QUARANTINED in self.types)
        event = entry.envelope.event
        if self.types and type(event).__name__ not in self.types:
            return False
        if self.node and self.node not in event.nodes_named():
            return False
        return not self.task or self.task in event.tasks_named()
