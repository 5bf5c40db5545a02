"""Copies of states: which node holds which state of which task in its memory."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.folding import commands
from unicrond.core.state.changes import with_task
from unicrond.core.state.ordered_map import put, without
from unicrond.core.state.state import ClusterState
from unicrond.core.state.task_parts import KeptState
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope


def state_kept(state: ClusterState, event: v.SnapshotStored, _: Envelope) -> ClusterState:
    """Record which iteration of a shard's state a known node holds in memory; a later one replaces it."""
    task = state.tasks.get(event.task)
    if task is None or event.node not in state.nodes:
        return state
    copy = KeptState(
        node=event.node,
        shard=event.shard,
        iteration=event.iteration,
        generation=event.generation,
        origin=event.origin,
        size_bytes=event.size_bytes,
        shards=event.shards,
    )
    all_kept = put(task.copies.holdings, f"{event.node}/{event.shard}", copy)
    return with_task(state, replace(task, copies=replace(task.copies, holdings=all_kept)))


def peers_remembered(state: ClusterState, event: v.PeersRemembered, _: Envelope) -> ClusterState:
    """Forget the peers of the task if the node remembers others: they are sent anew to all (`peers_are_stale`)."""
    task = state.tasks.get(event.task)
    if task is None or tuple(peer.node for peer in task.copies.peers) == event.peers:
        return state
    return with_task(state, replace(task, copies=replace(task.copies, peers=())))


def drop_state(state: ClusterState, event: v.DropState, _: Envelope) -> ClusterState:
    """Forget all that the node holds of the task."""
    return forget_kept(commands.count_command(state, event.node), event.node, (event.task,))


def forget_kept(state: ClusterState, node: str, tasks: tuple[str, ...] | None = None) -> ClusterState:
    """Forget what the node holds of these tasks, or of all tasks if `tasks` is None."""
    for task in state.tasks.values():
        if (tasks is None or task.name in tasks) and any(copy.node == node for copy in task.copies.holdings.values()):
            places = [place for place, copy in task.copies.holdings.items() if copy.node == node]
            copies = without(task.copies.holdings, places)
            state = with_task(state, replace(task, copies=replace(task.copies, holdings=copies)))
    return state
