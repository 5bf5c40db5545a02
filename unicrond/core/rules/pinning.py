"""Pinning: the seats that tasks in mode observe keep, whatever the plan would rather have. Pure.

Rules
-----
* A pinned task keeps the number of its replicas, and each of them the nodes that it has, as long as these may carry
  workers. Only a replica whose node is lost, isolated, or drained by a person gets seats on free slots; where there are
  none it waits.
* Pinned tasks and their seats are no part of the plan problem: the others share the rest.
* A task that has no workers yet is not pinned, nor is one to which a person has given other bounds or another layout
  that its present workers do not fit: a plan gives these what the rest has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from unicrond.core.nodes.brakes import observes
from unicrond.core.planning.placement import Replica, place
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import Task
from unicrond.core.tasks.reshaping import planned_shape
from unicrond.events.vocabulary.phrases import count
from unicrond.events.vocabulary.shape import Shape

#: Task -> its seats, replica by replica.
Pins: TypeAlias = Mapping[str, tuple[Replica, ...]]


def pins_of(survey: Survey) -> dict[str, tuple[Replica, ...]]:
    """Return the seats of all pinned tasks; empty where no task is in mode observe."""
    state = survey.state
    tasks = [task for task in survey.active if observes(state, task) and _is_pinned(survey, task)]
    if not tasks:
        return {}
    free = Counter(dict(survey.capacity))
    stays: dict[str, list[Replica]] = {}
    names = {task.name for task in tasks}
    for task in sorted(survey.active, key=lambda task: task.name not in names):
        stays[task.name] = []
        for nodes in _living(survey, task):
            if all(free[node] >= number for node, number in Counter(nodes).items()):
                free.subtract(nodes)
                stays[task.name].append(nodes)
    pins: dict[str, tuple[Replica, ...]] = {}
    for task in tasks:
        share = state.plan.assignments[task.name]
        replicas = stays[task.name]
        missing = len(share.replicas) - len(replicas)
        if missing > 0:
            room = {node: slots for node, slots in free.items() if slots > 0 and _is_of_type(survey, task, node)}
            placement = place({task.name: missing}, {task.name: shape_of(survey, task)}, room, {})
            for nodes in placement.replicas[task.name]:
                free.subtract(nodes)
                replicas = [*replicas, nodes]
        pins[task.name] = tuple(replicas)
    return pins


def shape_of(survey: Survey, task: Task) -> Shape:
    """Return the layout that the task has, or is on its way to because the plan has chosen it."""
    share = survey.state.plan.assignments.get(task.name)
    return planned_shape(task.spec, share) if task.reshaping.plan else task.spec.shape


def open_capacity(survey: Survey, pins: Pins) -> Mapping[str, int]:
    """Return the slots that pinned tasks leave, by node."""
    if not pins:
        return survey.capacity
    seats = Counter(node for replicas in pins.values() for nodes in replicas for node in nodes)
    return {node: slots - seats[node] for node, slots in survey.capacity.items()}


def changes(survey: Survey, pins: Pins, wanted: Mapping[str, tuple[Replica, ...]]) -> str:
    """Say which pinned tasks a plan would move, like "big 4 -> 6 workers". `wanted`: the seats that it gives."""
    texts = []
    for name, replicas in pins.items():
        workers, size = survey.state.tasks[name].spec.replica_workers, wanted.get(name, ())
        moves = sum((Counter(size) - Counter(replicas)).values())
        if len(size) != len(replicas):
            texts.append(f"{name} {len(replicas) * workers} -> {len(size) * workers} workers")
        elif moves:
            texts.append(f"{name}: {count(moves * workers, 'worker')} elsewhere")
    return ", ".join(texts)


def _is_pinned(survey: Survey, task: Task) -> bool:
    share = survey.state.plan.assignments.get(task.name)
    if share is None or not share.workers or (task.reshaping.reshape is not None and not task.reshaping.plan):
        return False
    shape = shape_of(survey, task)
    fits = all(shape.fits(nodes) for nodes in share.replicas)
    return fits and share.workers <= task.spec.max_workers


def _living(survey: Survey, task: Task) -> list[Replica]:
    """Return the replicas of the present plan whose nodes may carry them; on a cordoned node only while they live."""
    share, nodes_of = survey.state.plan.assignments.get(task.name), survey.state.nodes
    replicas = [nodes for nodes in (share.replicas if share else ()) if all(node in survey.capacity for node in nodes)]
    for nodes in survey.staffing(task).missing:
        if nodes in replicas and any(nodes_of[node].cordon.active for node in nodes):
            replicas.remove(nodes)
    return replicas


def _is_of_type(survey: Survey, task: Task, node: str) -> bool:
    return not survey.types or survey.gpus.get(node) == survey.type_of(task)
