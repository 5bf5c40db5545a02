"""Which entries a person asked for: by type, by node, by task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from events import vocabulary as v
from events.envelope import Entry, Quarantined

QUARANTINED = "Quarantined"
_ORDERED_FAULTS = (v.InjectionRequested, v.InjectFault)
TYPE_NAMES: tuple[str, ...] = (*sorted(kind.__name__ for kind in get_args(v.AnyEvent)), QUARANTINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Empty fields do not select. `types`: of TYPE_NAMES; any of them. Node and task: named anywhere in the event."""

    types: frozenset[str] = frozenset()
    node: str = ""
    task: str = ""

    def takes(self, entry: Entry) -> bool:
        """Whether the entry was asked for. Of a quarantined message nothing but its type is believed."""
        if isinstance(entry, Quarantined):
            return not (self.node or self.task) and (not self.types or QUARANTINED in self.types)
        event = entry.envelope.event
        if self.types and type(event).__name__ not in self.types:
            return False
        if self.node and self.node not in nodes_of(event):
            return False
        return not self.task or self.task in tasks_of(event)


def nodes_of(event: v.AnyEvent) -> Iterator[str]:
    """The nodes that an event names."""
    if isinstance(event, v.PlanAdopted):
        for assignment in event.assignments:
            for replica in assignment.replicas:
                yield from replica
            for stretch in assignment.nodes:
                yield stretch.node
        return
    if isinstance(event, v.MembershipDecided | v.MembershipPart):
        for run in event.seats:
            yield run.node
    node = getattr(event, "node", None)
    if node is not None:
        yield node


def tasks_of(event: v.AnyEvent) -> Iterator[str]:
    """The tasks that an event names."""
    if isinstance(event, v.PlanAdopted):
        for assignment in event.assignments:
            yield assignment.task
    elif isinstance(event, v.NodeJoined):
        for running in event.workers:
            yield running.task
    elif isinstance(event, v.TaskSubmitted | v.StartWorker | v.StartWorkers):
        yield event.spec.name
    else:
        task = getattr(event, "task", None)
        if task is not None:
            yield task
            return
        # A fault that was ordered for a worker, and an accelerator that one runs on.
        worker = event.fault.worker if isinstance(event, _ORDERED_FAULTS) else getattr(event, "worker", "")
        if worker:
            yield worker.rpartition(".")[0]
