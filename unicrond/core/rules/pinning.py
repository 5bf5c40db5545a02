"""Pinning: the seats that tasks keep in mode observe, or while nodes of an outage are awaited, whatever the plan would
rather have. Pure.

Rules
-----
* While nodes are awaited (nodes/outages.py) the tasks that have seats there are pinned, too, and nobody gets another
  seat there.
* A pinned task keeps the number of its replicas, and each of them the nodes that it has, as long as these may carry
  workers. Only a replica whose node is lost, isolated, or drained by a person gets seats on free slots, or on those of
  a task whose program fails; where there are none it waits.
* Pinned tasks and their seats are no part of the plan problem: the others share the rest.
* A task that has no workers yet is not pinned, nor is one to which a person has given other bounds or another layout
  that its present workers do not fit: a plan gives these what the rest has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
    """Return the seats of all pinned tasks; empty where no task is in mode observe and no node is awaited."""
    return _pins(survey, [t for t in survey.active if observes(survey.state, t) or _is_hit(survey, t)])


def outage_pins(survey: Survey) -> dict[str, tuple[Replica, ...]]:
    """Return the seats of the tasks that are pinned whatever their mode."""
    return _pins(survey, [task for task in survey.active if _is_hit(survey, task)])


def observed(survey: Survey, pins: Pins) -> Pins:
    """Return the pins of tasks that are pinned by their mode alone."""
    tasks = survey.state.tasks
    return {name: seats for name, seats in pins.items() if not _is_hit(survey, tasks[name])}


def kept_text(survey: Survey, pins: Pins) -> str:
    """Say which tasks keep their seats, and why, as the beginning of a plan's reason; "" where none does."""
    by_mode = observed(survey, pins)
    hit = [name for name in pins if name not in by_mode]
    texts = [f"mode observe keeps {', '.join(by_mode)}; "] if by_mode else []
    return "".join([*texts, *([f"{', '.join(hit)} awaits nodes of an outage; "] if hit else [])])


def _pins(survey: Survey, candidates: Sequence[Task]) -> dict[str, tuple[Replica, ...]]:
    state = survey.state
    tasks = [task for task in candidates if _is_pinned(survey, task)]
    if not tasks:
        return {}
    free = Counter(dict(survey.capacity))
    stays: dict[str, list[Replica]] = {}
    names = {task.name for task in tasks}
    of_failing = Counter[str]()
    for task in sorted(survey.active, key=lambda task: task.name not in names):
        if task.name in survey.failing and task.name not in names:  # it has only what others have no use for
            of_failing.update(node for nodes in _living(survey, task) for node in nodes)
            continue
        stays[task.name] = []
        for nodes in _living(survey, task):
            if all(free[node] >= number for node, number in Counter(nodes).items()):
                free.subtract(nodes)
                stays[task.name].append(nodes)
    pins: dict[str, tuple[Replica, ...]] = {}
    for task in tasks:
        share = state.plan.assignments[task.name]
        replicas = stays[task.name]
        for lent in (of_failing, Counter[str]()):  # nobody leaves a seat while another is free
            missing = len(share.replicas) - len(replicas)
            if missing <= 0:
                break
            room = {node: free[node] - lent[node] for node in free if _is_open(survey, task, node)}
            room = {node: slots for node, slots in room.items() if slots > 0}
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
    if not pins and not survey.absence.absentees:
        return survey.capacity
    seats = Counter(node for replicas in pins.values() for nodes in replicas for node in nodes)
    capacity = survey.capacity.items()
    return {node: slots - seats[node] for node, slots in capacity if node not in survey.absence.absentees}


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


def _is_hit(survey: Survey, task: Task) -> bool:
    """Return whether the plan has seats of the task on awaited nodes."""
    absentees, share = survey.absence.absentees, survey.state.plan.assignments.get(task.name)
    return bool(absentees) and share is not None and any(not absentees.isdisjoint(nodes) for nodes in share.replicas)


def _is_open(survey: Survey, task: Task, node: str) -> bool:
    """Return whether a worker of the task may be placed on the node anew."""
    is_of_type = not survey.types or survey.gpus.get(node) == survey.type_of(task)
    return is_of_type and node not in survey.absence.absentees and node not in survey.nodes.cordoned
