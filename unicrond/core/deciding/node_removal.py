"""Nodes that are to be removed from the cluster. The rules: unicrond/core/nodes/node_removal.py."""

from __future__ import annotations

from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.nodes.node_removal import is_planned_for
from unicrond.core.state.state import Node, NodeStatus
from unicrond.events import vocabulary as v

#: How long an agent that is commanded to leave waits for its workers to be moved away, in microseconds.
LEAVE_LIMIT_US = 600_000_000


def forget_nodes(batch: DecisionBatch) -> None:
    """Tell the nodes that are up to leave, and forget the others."""
    state = batch.state
    for name in batch.survey.nodes.forgetting:
        node = state.nodes[name]
        if node.status is NodeStatus.UP:
            if not (node.leave_ordered or node.leaving):
                _tell(batch, node, for_good=True)
        elif not is_planned_for(state, name):
            if node.status is NodeStatus.LOST and not node.leaving:
                _tell(batch, node, for_good=False)
            batch.add(v.NodeForgotten(node=name, reason=node.forgetting))


def _tell(batch: DecisionBatch, node: Node, *, for_good: bool) -> None:
    """Add the command to leave. `for_good`: the agent does not come back."""
    batch.add(
        v.LeaveCluster(
            command_id=batch.command_id(node.name),
            node=node.name,
            epoch=batch.state.plan.epoch,
            for_good=for_good,
            limit_us=LEAVE_LIMIT_US,
            reason=node.forgetting,
        )
    )
