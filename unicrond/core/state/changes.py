"""The small changes of state that the folds of all subjects are made of."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from unicrond.core.state.ordered_map import put, without
from unicrond.core.state.state import ClusterState, Incident, Node, Task, Worker
from unicrond.core.state.worker_lifecycle import status_after
from unicrond.events import vocabulary as v


def with_node(state: ClusterState, node: Node) -> ClusterState:
    """Return the state with `node` in place of what it held under that name."""
    return replace(state, nodes=put(state.nodes, node.name, node))


def with_task(state: ClusterState, task: Task) -> ClusterState:
    """Return the state with `task` in place of what it held under that name."""
    return replace(state, tasks=put(state.tasks, task.name, task))


def with_worker(task: Task, worker: Worker) -> Task:
    """Return the task with `worker` in place of what it held under that id."""
    return replace(task, workers=put(task.workers, worker.worker, worker))


def with_moved(task: Task, worker: Worker, event: type[v.AnyEvent], **fields: Any) -> Task:
    """Return the task with the worker where `event` moves it (worker_lifecycle.py), and with these fields besides."""
    return with_worker(task, replace(worker, status=status_after(worker.status, event), **fields))


def without_workers(task: Task, names: list[str]) -> Task:
    """Return the task without the workers of these ids."""
    return replace(task, workers=without(task.workers, names))


def with_incident(state: ClusterState, incident: Incident) -> ClusterState:
    """Return the state with `incident` in place of what it held under that id."""
    return replace(state, incidents=state.incidents | {incident.id: incident})


def find_worker(state: ClusterState, task: str, worker: str) -> tuple[Task, Worker] | None:
    """Return the task and the worker, where the state has both; else None: the report about them is stale."""
    known_task = state.tasks.get(task)
    known_worker = known_task.workers.get(worker) if known_task else None
    return (known_task, known_worker) if known_task and known_worker else None


def has_trained(task: Task, name: str) -> bool:
    """Return whether the worker is in a group of the task, or has been, as far as the log says."""
    worker = task.workers.get(name)
    return worker is not None and (task.is_member(name) or bool(task.generation_of(worker)))
