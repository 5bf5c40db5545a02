"""Decisions about nodes: which are checked now or readmitted (nodes/isolation.py), when workers leave one ahead of its
deadline (nodes/drains.py), and which are removed from the cluster (nodes/node_removal.py)."""

from __future__ import annotations

from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.deciding.response import failed_tasks
from unicrond.core.nodes import gpu_types, isolation
from unicrond.core.nodes.drains import is_end_over
from unicrond.core.nodes.isolation import IsolationPhase
from unicrond.core.nodes.node_removal import is_planned_for
from unicrond.core.planning.placement import place_apart
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import Node, NodeStatus, Severity
from unicrond.core.tasks.reshaping import planned_shape
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
            # Where a failure is only predicted, the workers leave first.
            if not (node.health.failure_forecast and state.by_node.on(node.name)):
                _check(batch, node)
        elif node.name in blamed:
            continue
        elif phase is IsolationPhase.CLEARED:
            batch.add(v.NodeReadmitted(node=node.name, reason=isolation.why_cleared(state, node)))
        elif tasks := failed_tasks(state, node):
            failed = f"task {tasks[0]} was" if len(tasks) == 1 else f"tasks {' and '.join(tasks)} were"
            batch.add(v.NodeReadmitted(node=node.name, reason=f"{failed} at fault, not the node"))


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


def begin_drains(batch: DecisionBatch) -> None:
    """Begin to drain one node that can be emptied at no cost to the plan. The workers must stand where the plan puts
    them, so the next node waits until they do."""
    survey = batch.survey
    if not survey.fresh:
        return
    for name in survey.nodes.dated:
        node = batch.state.nodes[name]
        if node.cordon.draining or not node.cordon.active or not node.schedulable:
            continue
        if not batch.state.by_node.on(name):
            batch.add(v.DrainStarted(node=name, reason="no worker is on it"))
        elif survey.room_without(name, _has_room_without):
            batch.add(v.DrainStarted(node=name, reason="the plan has room for its workers elsewhere"))
        if batch.events:
            return  # the next node is examined once this node's workers have a plan


def _has_room_without(survey: Survey, node: str) -> bool:
    """Return whether the present plan can be placed on the other nodes, worker for worker."""
    slots = {name: count for name, count in survey.capacity.items() if name != node}
    assignments = survey.state.plan.assignments
    shares = [(task, assignments[task.name]) for task in survey.active if task.name in assignments]
    if any(task.reshaping.reshape is not None for task, _ in shares):
        return False
    if sum(share.workers for _, share in shares) > sum(slots.values()):
        return False
    gpu_types_of = {task.name: gpu_types.of_assignment(survey.state.nodes, share) or "" for task, share in shares}
    placed = place_apart(
        {task.name: len(share.replicas) for task, share in shares},
        {task.name: planned_shape(task.spec, share) for task, share in shares},
        slots,
        {task.name: share.replicas for task, share in shares},
        (survey.gpus, gpu_types_of),
        closed=survey.nodes.cordoned,
    )
    return not placed.short


def end_departures(batch: DecisionBatch) -> None:
    """Count nodes as lost whose announced end is over: also where no head was there to see them go."""
    now_us = batch.state.now_us
    for name in sorted(batch.survey.nodes.departing):
        node = batch.state.nodes[name]
        if node.status is NodeStatus.UP and node.departure.announced and is_end_over(node, now_us):
            since_s = (now_us - node.departure.ends_us) / 1e6
            reason = f"the end that its agent announced is over since {since_s:.0f} s"
            batch.add(v.NodeLost(node=name, evidence=v.Evidence(beat_seq=0, beat_at_us=0), reason=reason))


#: How long an agent that is commanded to leave waits for its workers to be moved away, in microseconds.
LEAVE_LIMIT_US = 600_000_000


def forget_nodes(batch: DecisionBatch) -> None:
    """Tell the nodes that are up to leave, and forget the others."""
    state = batch.state
    for name in batch.survey.nodes.forgetting:
        node = state.nodes[name]
        if node.status is NodeStatus.UP:
            if not (node.departure.leave_ordered or node.departure.announced):
                _tell(batch, node, for_good=True)
        elif not is_planned_for(state, name):
            if node.status is NodeStatus.LOST and not node.departure.announced:
                _tell(batch, node, for_good=False)
            batch.add(v.NodeForgotten(node=name, reason=node.departure.removal))


def _tell(batch: DecisionBatch, node: Node, *, for_good: bool) -> None:
    """Add the command to leave. `for_good`: the agent does not come back."""
    batch.add(
        v.LeaveCluster(
            command_id=batch.command_id(node.name),
            node=node.name,
            epoch=batch.state.plan.epoch,
            for_good=for_good,
            limit_us=LEAVE_LIMIT_US,
            reason=node.departure.removal,
        )
    )
