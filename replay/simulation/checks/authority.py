"""The rule of authority: what a node says touches what it carries, and nothing else (rules/authority.py)."""

from __future__ import annotations

from unicrond.core.state.state import ClusterState, Task
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.replay.simulation.faults.boundary_events import is_forged


def words_stay_at_home(before: ClusterState, entry: RecordedEvent, after: ClusterState) -> str:
    """Check that what a node says changes no task that it has nothing to do with, and no other node; and that what an
    honest one says is not refused."""
    event, node = entry.envelope.event, entry.envelope.producer
    if event.is_decided or event.is_request:
        return ""
    if not is_forged(entry.envelope) and after.refused_observations is not before.refused_observations:
        return f"entry {entry.seq} of {node} is refused: {after.refusals[-1].reason}"
    for name, task in after.tasks.items():
        old = before.tasks.get(name)
        if old is not task and (old is None or not _concerns(before, old, node)) and old != task:
            return f"entry {entry.seq} of {node}, {type(event).__name__}, changes {name}, which it does not carry"
    for name, node_after in after.nodes.items():
        if name != node and before.nodes.get(name) is not node_after and before.nodes.get(name) != node_after:
            return f"entry {entry.seq} of {node}, {type(event).__name__}, changes {name}"
    return ""


def _concerns(state: ClusterState, task: Task, node: str) -> bool:
    """Return whether the node has, or has had, a part in the task."""
    return (
        bool(state.by_node.of_task(node, task.name))
        or node in task.group.probing.orders  # it was asked about the links of the task
        or any(lead.node == node for lead in task.group.leads)
        or node in task.copies.carriers
        or task.troubles.names(node)  # that it could not run the program there ends with its agent
    )
