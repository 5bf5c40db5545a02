"""Strays: processes on a node that no command of the log has started, or that their task has forgotten. Pure.

Rules
-----
* A stray stands on its node, beside the task whose name it bears: its node alone is touched by what is said of it.
* It is ordered to end as soon as its node is up (`deciding/worker_placement.py`), and takes a slot until it has.
* The list of what an agent runs (NodeJoined) replaces what was known.
"""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.state.changes import with_node
from unicrond.core.state.node_parts import Stray
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.placements import starts


def strays_among(state: ClusterState, event: v.NodeJoined) -> dict[str, Stray]:
    """Return the strays among the workers that the agent runs."""
    return {
        running.worker: Stray(task=running.task, worker=running.worker, pid=running.pid)
        for running in event.workers
        if running.task in state.tasks and running.worker not in state.tasks[running.task].workers
    }


def with_stray(state: ClusterState, event: v.WorkerStarted) -> ClusterState:
    """Return the state with the process as a stray of its node, if that is known and can run so many."""
    node = state.nodes.get(event.node)
    if node is None or (event.worker not in node.strays and len(node.strays) >= node.slots_max):
        return state
    stray = Stray(task=event.task, worker=event.worker, pid=event.pid)
    return with_node(state, replace(node, strays=node.strays | {event.worker: stray}))


def stop_ordered(state: ClusterState, event: v.StopWorker) -> ClusterState:
    """Note by which command the stray is to end."""
    node = state.nodes.get(event.node)
    if node is None or event.worker not in node.strays:
        return state
    stray = replace(node.strays[event.worker], command_id=event.command_id)
    return with_node(state, replace(node, strays=node.strays | {event.worker: stray}))


def stop_answered(state: ClusterState, event: v.CommandApplied | v.CommandFailed) -> ClusterState:
    """Forget the stray that the command has ended; one that it could not end is ordered to end again."""
    node = state.nodes.get(event.node)
    stray = (
        next((stray for stray in node.strays.values() if stray.command_id == event.command_id), None) if node else None
    )
    if node is None or stray is None:
        return state
    if isinstance(event, v.CommandApplied):
        return without_strays(state, node.name, stray.worker)
    return with_node(state, replace(node, strays=node.strays | {stray.worker: replace(stray, command_id="")}))


def without_strays(state: ClusterState, name: str, *workers: str) -> ClusterState:
    """Return the state in which the node has no stray of these ids."""
    node = state.nodes.get(name)
    if node is None or node.strays.keys().isdisjoint(workers):
        return state
    rest = {worker: stray for worker, stray in node.strays.items() if worker not in workers}
    return with_node(state, replace(node, strays=rest))


def without_started(state: ClusterState, event: v.StartWorker | v.StartWorkers) -> ClusterState:
    """Forget the strays whose ids a command starts now on their node."""
    orders = (event,) if isinstance(event, v.StartWorker) else starts(event)
    return without_strays(state, event.node, *[order.worker for order in orders])
