"""Copies of a task's state in memory: on which nodes they are stored, and when their memory is freed."""

from __future__ import annotations

from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.deciding.memberships import Audience
from unicrond.core.state.state import Task, TaskStatus
from unicrond.core.tasks import memory_places
from unicrond.events import vocabulary as v


def tell_peers(batch: DecisionBatch, task: Task) -> None:
    """Decide anew which nodes take copies, where nodes have joined or left since the membership was sent."""
    if task.status is not TaskStatus.ACTIVE:
        return
    targets = batch.survey.targets(task)
    if not memory_places.peers_are_stale(task, targets) or not task.confirmed:
        return
    peers = memory_places.peers(batch.state, task, targets)
    audience = Audience(batch, task, task.membership.members if task.membership else ())
    batch.add(v.PeersDecided(task=task.name, peers=peers), audience.schemas)


def drop_state(batch: DecisionBatch, task: Task) -> None:
    """Free the memory that holds a task's state, once the task has ended and no process writes to it."""
    if task.status is TaskStatus.ACTIVE or not task.at_rest:
        return
    for node in memory_places.to_drop(batch.state, task):
        batch.add(
            v.DropState(
                command_id=batch.command_id(node.name),
                node=node.name,
                epoch=batch.state.plan.epoch,
                task=task.name,
            )
        )
