"""Isolated nodes: which are checked now, and which are taken back. The rules: unicrond/core/isolation.py."""

from __future__ import annotations

from events import vocabulary as v
from unicrond.core import isolation
from unicrond.core.deciding.batch import Batch
from unicrond.core.isolation import Phase
from unicrond.core.state import Node, Severity, TaskStatus


def readmit_nodes(batch: Batch) -> None:
    """None is readmitted while its incident is open: it would be isolated for that again."""
    state = batch.state
    isolated = [state.nodes[name] for name in batch.survey.nodes.isolated]
    blamed = {incident.node for incident in state.incidents.values() if incident.severity is Severity.SEV1}
    for node in isolated:
        now = isolation.phase(state, node)
        if now is Phase.TO_CHECK:
            if not (node.foretold and state.by_node.on(node.name)):  # nothing has failed: its workers leave first
                _check(batch, node)
        elif node.name in blamed:
            continue
        elif now is Phase.CLEARED:
            batch.add(v.NodeReadmitted(node=node.name, reason=isolation.why_cleared(state, node)))
        elif innocent_of := _innocent_of(batch, node):
            batch.add(v.NodeReadmitted(node=node.name, reason=f"task {innocent_of} was at fault, not the node"))


def _check(batch: Batch, node: Node) -> None:
    batch.add(
        v.CheckNode(
            command_id=batch.command_id(node.name),
            node=node.name,
            epoch=batch.state.plan.epoch,
            limit_us=batch.state.check_limit_us,
            reason=node.reason[:1024],
        )
    )


def _innocent_of(batch: Batch, node: Node) -> str:
    """The task that failed elsewhere, too; "" where the node itself is blamed."""
    if node.isolation is not None and node.isolation.cause == "hardware":
        return ""
    tasks = batch.state.tasks.values()
    strikers = [task for task in tasks if task.troubles.names(node.name)]
    failed = strikers and all(task.status is TaskStatus.FAILED for task in strikers)
    return strikers[0].name if failed else ""
