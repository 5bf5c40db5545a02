"""Isolated nodes: which are checked now, and which are readmitted. The rules: unicrond/core/nodes/isolation.py."""

from __future__ import annotations

from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.nodes import isolation
from unicrond.core.nodes.isolation import IsolationPhase
from unicrond.core.state.state import Node, Severity, TaskStatus
from unicrond.events import vocabulary as v


def readmit_nodes(batch: DecisionBatch) -> None:
    """Check or readmit isolated nodes. None is readmitted while its incident is open: it would be isolated for that
    again."""
    state = batch.state
    isolated = [state.nodes[name] for name in batch.survey.nodes.isolated]
    blamed = {incident.node for incident in state.incidents.values() if incident.severity is Severity.SEV1}
    for node in isolated:
        phase = isolation.phase(state, node)
        if phase is IsolationPhase.TO_CHECK:
            if not (
                node.failure_forecast and state.by_node.on(node.name)
            ):  # nothing has failed: its workers leave first
                _check(batch, node)
        elif node.name in blamed:
            continue
        elif phase is IsolationPhase.CLEARED:
            batch.add(v.NodeReadmitted(node=node.name, reason=isolation.why_cleared(state, node)))
        elif innocent_of := _failed_task(batch, node):
            batch.add(v.NodeReadmitted(node=node.name, reason=f"task {innocent_of} was at fault, not the node"))


def _check(batch: DecisionBatch, node: Node) -> None:
    batch.add(
        v.CheckNode(
            command_id=batch.command_id(node.name),
            node=node.name,
            epoch=batch.state.plan.epoch,
            limit_us=batch.state.check_limit_us,
            reason=node.reason[:1024],
        )
    )


def _failed_task(batch: DecisionBatch, node: Node) -> str:
    """Return the task that was at fault since it failed on other nodes too; "" where the node itself is blamed."""
    if node.isolation is not None and node.isolation.cause == "hardware":
        return ""
    tasks = batch.state.tasks.values()
    strikers = [task for task in tasks if task.troubles.names(node.name)]
    failed = strikers and all(task.status is TaskStatus.FAILED for task in strikers)
    return strikers[0].name if failed else ""
