"""Kept states: what the memory of this node holds, copied to peers and told to the log. Rules: core.py."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from agents.handling.turn import Turn
from agents.protocol.messages import Captured, Forget
from agents.state import ArmTimer, CopyState, Held, Order, TellForkServer
from events.vocabulary import MemoryService, StateKept

#: A log that syncs each entry takes some 800 in a second.
TELL_APART_S = 0.002
TELL_WITHIN_S = 2.0


def captured(turn: Turn, task: str, capture: Captured) -> None:
    """A worker has captured its state: have it copied to peers on other nodes, and tell of it."""
    membership = turn.memory.memberships.get(task)
    peers = tuple(peer for peer in (membership.peers if membership else ()) if peer.node != turn.config.node)
    if peers:
        turn.actions.append(CopyState(task=task, shard=capture.shard, peers=peers))
    held(
        turn,
        Held(
            task=task,
            shard=capture.shard,
            iteration=capture.iteration,
            generation=capture.generation,
            origin=turn.config.node,
            size_bytes=capture.size_bytes,
            shards=capture.shards,
            duration_us=capture.duration_us,
        ),
    )


def set_peers(turn: Turn, task: str, peers: tuple[MemoryService, ...]) -> None:
    """What is here is copied at once: the next capture may be long in coming."""
    membership = turn.memory.memberships.get(task)
    if membership is not None:
        changed = replace(membership, peers=peers)
        turn.remember(memberships={**turn.memory.memberships, task: changed})
    others = tuple(peer for peer in peers if peer.node != turn.config.node)
    for key in sorted(turn.state.holds):
        name, _, shard = key.partition("/")
        if name == task and others:
            turn.actions.append(CopyState(task=task, shard=int(shard), peers=others))


def held(turn: Turn, held: Held) -> None:
    """The node's memory holds a state: tell it when it is this node's turn, or with the next turn of its timer."""
    key = f"{held.task}/{held.shard}"
    turn.state = replace(turn.state, holds=turn.state.holds | {key})
    if key in turn.state.untold or turn.state.phase == "adopting":  # the node joins first
        turn.state = replace(turn.state, untold={**turn.state.untold, key: held})
    elif after_s := _turn_s(turn, held.task):
        turn.state = replace(turn.state, untold={**turn.state.untold, key: held})
        turn.actions.append(ArmTimer(name="held", key=key, after_s=after_s))
    else:
        tell_held(turn, held)


def _turn_s(turn: Turn, task: str) -> float:
    """How long the node waits for those that stand before it among the nodes of the task."""
    membership = turn.memory.memberships.get(task)
    before: dict[str, None] = {}
    for member in membership.members if membership else ():
        if member.node == turn.config.node:
            return min(len(before) * TELL_APART_S, TELL_WITHIN_S)
        before[member.node] = None
    return 0.0


def tell_held(turn: Turn, held: Held) -> None:
    """Append StateKept; the next of the same shard waits `held_interval_s` seconds."""
    key = f"{held.task}/{held.shard}"
    turn.state = replace(turn.state, untold={**turn.state.untold, key: None})
    turn.actions.append(ArmTimer(name="held", key=key, after_s=turn.config.held_interval_s))
    turn.append(
        StateKept(
            node=turn.config.node,
            task=held.task,
            shard=held.shard,
            iteration=held.iteration,
            generation=held.generation,
            origin=held.origin,
            size_bytes=held.size_bytes,
            shards=held.shards,
            duration_us=held.duration_us,
        )
    )


def drop_state(turn: Turn, task: str, order: Order) -> None:
    """Forget all states of the task, and answer the order."""
    forget_untold(turn, lambda key: key.partition("/")[0] == task)
    holds = (key for key in turn.state.holds if key.partition("/")[0] != task)
    turn.state = replace(turn.state, holds=frozenset(holds))
    turn.actions.append(TellForkServer(message=Forget(task=task)))
    turn.answer(order)


def forget_untold(turn: Turn, gone: Callable[[str], bool]) -> None:
    """Do not tell of states whose key ("task/shard") `gone` says is gone."""
    untold = {key: held for key, held in turn.state.untold.items() if not gone(key)}
    turn.state = replace(turn.state, untold=untold)
