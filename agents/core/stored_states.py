"""Tracks the training states in this node's memory: has them copied to peers, and reports them to the log. Rules:
machine.py."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from unicrond.agents.core.state import ArmTimer, CopyState, PendingCommand, TellForkServer
from unicrond.agents.core.transaction import Transition
from unicrond.agents.protocol.messages import ReleaseMemory
from unicrond.events.vocabulary import MemoryService, SnapshotStored

#: A log that syncs each entry takes some 800 in a second.
TELL_APART_S = 0.002
TELL_WITHIN_S = 2.0


def captured(transition: Transition, snapshot: SnapshotStored) -> None:
    """Have a state that a worker has captured copied to peers on other nodes, and report it."""
    membership = transition.memory.memberships.get(snapshot.task)
    peers = tuple(peer for peer in (membership.peers if membership else ()) if peer.node != transition.config.node)
    if peers:
        transition.actions.append(CopyState(task=snapshot.task, shard=snapshot.shard, peers=peers))
    report_held(transition, snapshot)


def set_peers(transition: Transition, task: str, peers: tuple[MemoryService, ...]) -> None:
    """Set the task's peers, and copy the states that are here at once: the next capture may be long in coming."""
    membership = transition.memory.memberships.get(task)
    if membership is not None:
        changed = replace(membership, peers=peers)
        transition.remember(memberships={**transition.memory.memberships, task: changed})
    remote_peers = tuple(peer for peer in peers if peer.node != transition.config.node)
    for key in sorted(transition.state.holds):
        name, _, shard = key.partition("/")
        if name == task and remote_peers:
            transition.actions.append(CopyState(task=task, shard=int(shard), peers=remote_peers))


def report_held(transition: Transition, snapshot: SnapshotStored) -> None:
    """Report a state in the node's memory: at once, or with the node's place among the others or its timer."""
    key = f"{snapshot.task}/{snapshot.shard}"
    transition.state = replace(transition.state, holds=transition.state.holds | {key})
    if key in transition.state.untold or transition.state.phase == "adopting":  # the node joins first
        transition.state = replace(transition.state, untold={**transition.state.untold, key: snapshot})
    elif after_s := _stagger_s(transition, snapshot.task):
        transition.state = replace(transition.state, untold={**transition.state.untold, key: snapshot})
        transition.actions.append(ArmTimer(name="held", key=key, after_s=after_s))
    else:
        tell_held(transition, snapshot)


def _stagger_s(transition: Transition, task: str) -> float:
    """Return how long the node waits for those that stand before it among the nodes of the task."""
    membership = transition.memory.memberships.get(task)
    before: dict[str, None] = {}
    for member in membership.members if membership else ():
        if member.node == transition.config.node:
            return min(len(before) * TELL_APART_S, TELL_WITHIN_S)
        before[member.node] = None
    return 0.0


def tell_held(transition: Transition, snapshot: SnapshotStored) -> None:
    """Append SnapshotStored; the next of the same shard waits `held_interval_s` seconds."""
    key = f"{snapshot.task}/{snapshot.shard}"
    transition.state = replace(transition.state, untold={**transition.state.untold, key: None})
    transition.actions.append(ArmTimer(name="held", key=key, after_s=transition.config.held_interval_s))
    transition.append(snapshot)


def drop_state(transition: Transition, task: str, order: PendingCommand) -> None:
    """Forget all states of the task, and answer the order."""
    forget_untold(transition, lambda key: key.partition("/")[0] == task)
    holds = (key for key in transition.state.holds if key.partition("/")[0] != task)
    transition.state = replace(transition.state, holds=frozenset(holds))
    transition.actions.append(TellForkServer(message=ReleaseMemory(task=task)))
    transition.answer(order)


def forget_untold(transition: Transition, is_dropped: Callable[[str], bool]) -> None:
    """Forget unreported states whose key ("task/shard") `is_dropped` accepts."""
    untold = {key: snapshot for key, snapshot in transition.state.untold.items() if not is_dropped(key)}
    transition.state = replace(transition.state, untold=untold)
