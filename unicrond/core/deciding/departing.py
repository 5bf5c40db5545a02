"""Planned departures: when workers leave before a time is near, what is ended after it, and nodes that are expected to
fail. The rules: unicrond/core/departures.py."""

from __future__ import annotations

from events import vocabulary as v
from unicrond.core import gpu_types
from unicrond.core.deciding.batch import Batch
from unicrond.core.planning.placement import place_apart
from unicrond.core.reshaping import planned_shape
from unicrond.core.state import Node
from unicrond.core.survey import Survey


def begin_drains(batch: Batch) -> None:
    """The nodes that can be emptied at no cost to the plan. Its workers are to stand where it wants them."""
    survey = batch.survey
    if not survey.fresh:
        return
    for name in survey.nodes.dated:
        node = batch.state.nodes[name]
        if node.draining or not node.cordoned or not node.schedulable:
            continue
        if not batch.state.by_node.on(name):
            batch.add(v.DrainBegun(node=name, reason="no worker is on it"))
        elif survey.room_without(name, _has_room_without):
            batch.add(v.DrainBegun(node=name, reason="the plan has room for its workers elsewhere"))
        if batch.events:
            return  # the next one is looked at when this one's workers have a plan


def _has_room_without(survey: Survey, node: str) -> bool:
    """The present plan can be seated on the other nodes, worker for worker."""
    slots = {name: count for name, count in survey.capacity.items() if name != node}
    given = survey.state.plan.assignments
    shares = [(task, given[task.name]) for task in survey.active if task.name in given]
    if any(task.reshaping.reshape is not None for task, _ in shares):
        return False
    if sum(share.workers for _, share in shares) > sum(slots.values()):
        return False
    where = {task.name: gpu_types.of_assignment(survey.state.nodes, share) or "" for task, share in shares}
    placed = place_apart(
        {task.name: len(share.replicas) for task, share in shares},
        {task.name: planned_shape(task.spec, share) for task, share in shares},
        slots,
        {task.name: share.replicas for task, share in shares},
        (survey.gpus, where),
    )
    return not placed.short


def can_spare(batch: Batch, node: Node) -> bool:
    """Every task that has workers keeps its minimum without the node, by numbers."""
    survey = batch.survey
    given = survey.state.plan.assignments
    there = sum(count for name, count in survey.capacity.items() if name != node.name)
    need = sum(task.spec.min_workers for task in survey.active if task.name in given and given[task.name].workers)
    return there > 0 and need <= there
