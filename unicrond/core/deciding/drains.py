"""Planned departures: when workers leave a node ahead of its deadline, what is ended after it, and nodes that are
expected to fail. The rules: unicrond/core/nodes/drains.py."""

from __future__ import annotations

from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.nodes import gpu_types
from unicrond.core.planning.placement import place_apart
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import Node
from unicrond.core.tasks.reshaping import planned_shape
from unicrond.events import vocabulary as v


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
    )
    return not placed.short


def can_spare(survey: Survey, node: Node) -> bool:
    """Return whether the slots of the other nodes suffice for the minimum of every task that has workers. Only numbers
    are compared."""
    assignments = survey.state.plan.assignments
    slots = sum(count for name, count in survey.capacity.items() if name != node.name)
    need = sum(
        task.spec.min_workers for task in survey.active if task.name in assignments and assignments[task.name].workers
    )
    return slots > 0 and need <= slots
