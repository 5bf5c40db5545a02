"""Nodes that are to be forgotten. The rules: unicrond/core/forgetting.py."""

from __future__ import annotations

from events import vocabulary as v
from unicrond.core.deciding.batch import Batch
from unicrond.core.forgetting import is_planned_for
from unicrond.core.state import Node, NodeStatus

#: An agent that is told to leave waits so long for its workers to be moved away.
LEAVE_LIMIT_US = 600_000_000


def forget_nodes(batch: Batch) -> None:
    """Those that are up are told to leave, the others are forgotten."""
    state = batch.state
    for name in batch.survey.nodes.forgetting:
        node = state.nodes[name]
        if node.status is NodeStatus.UP:
            if not (node.dismissed or node.leaving):
                _tell(batch, node, for_good=True)
        elif not is_planned_for(state, name):
            if node.status is NodeStatus.LOST and not node.leaving:
                _tell(batch, node, for_good=False)
            batch.add(v.NodeForgotten(node=name, reason=node.forgetting))


def _tell(batch: Batch, node: Node, *, for_good: bool) -> None:
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
