"""Joining and leaving: the node, and the log that it belongs to. Rules: core.py."""

from __future__ import annotations

from msgspec.structs import replace

from agents.handling import commits, kept_states, starting, stopping
from agents.handling.turn import MAX_TEXT, Turn
from agents.protocol.messages import Forget
from agents.state import Finish, Remembered, TellForkServer
from events.vocabulary import NodeJoined, NodeLeft, PeersRemembered, RunningWorker, StoreAddress


def join_if_complete(turn: Turn) -> None:
    """Join once the log has been seen, the store runs and every adopted worker has been heard."""
    state = turn.state
    if state.phase == "adopting" and state.log_seen and state.store_port and not state.unheard:
        turn.state = replace(turn.state, phase="up")
        join(turn)


def join(turn: Turn) -> None:
    """Append NodeJoined with the workers that run here, and tell of what the node's memory holds."""
    config = turn.config
    running = [
        RunningWorker(worker=w.worker, task=w.task, pid=w.pid, generation=w.generation)
        for _, w in sorted(turn.memory.workers.items())
        if w.pid and not w.foreign
    ]
    turn.state = replace(turn.state, joined_port=turn.state.store_port)
    turn.append(
        NodeJoined(
            node=config.node,
            address=config.address,
            slots=config.slots,
            store=StoreAddress(host=config.address, port=turn.state.store_port),
            agent_boot=config.agent_boot,
            version=config.version,
            workers=tuple(running),
            memory=config.memory,
        )
    )
    members = [w for _, w in sorted(turn.memory.workers.items()) if w.pid and w.member and not w.foreign]
    for task in dict.fromkeys(worker.task for worker in members):
        membership = turn.memory.memberships.get(task)
        peers = tuple(peer.node for peer in membership.peers) if membership else ()
        turn.append(PeersRemembered(node=config.node, task=task, peers=peers))
    for held in turn.state.untold.values():
        if held is not None:
            kept_states.tell_held(turn, held)


def leave(turn: Turn, reason: str) -> None:
    """Stop all workers, give up all starts, and leave when nothing runs here any more. A second call does nothing."""
    if turn.state.phase in ("leaving", "left"):
        return
    turn.state = replace(turn.state, phase="leaving", leave_reason=reason[:MAX_TEXT])
    for waiting in turn.memory.waiting:
        starting.give_up_start(turn, waiting, "the node is leaving")
    for worker in sorted(turn.memory.workers):
        stopping.stop(turn, turn.memory.workers[worker], f"the node is leaving: {reason}")
    leave_if_empty(turn)


def leave_if_empty(turn: Turn) -> None:
    """Append NodeLeft and finish, if the node is leaving and its last worker is gone. A newcomer that has not come to
    see the log has not joined: it has nothing to leave, and an older agent of its name may be at work."""
    if turn.state.phase != "leaving" or turn.memory.workers:
        return
    commits.close_all_sums(turn)
    turn.state = replace(turn.state, phase="left")
    if turn.state.log_seen or turn.memory.log:
        turn.append(NodeLeft(node=turn.config.node, reason=turn.state.leave_reason))
    turn.actions.append(Finish())


def log_seen(turn: Turn, identity: str) -> None:
    """The log answers. A log with another identity than the known one makes all workers foreign."""
    known = turn.memory.log
    if known and identity and identity != known:
        forget_log(turn)
    if identity:
        turn.remember(log=identity)
    turn.state = replace(turn.state, log_seen=True)
    join_if_complete(turn)


def forget_log(turn: Turn) -> None:
    """Forget all that belongs to another log, and stop its workers."""
    memory = Remembered(
        since_boot=turn.memory.since_boot,
        workers={w: replace(record, foreign=True) for w, record in turn.memory.workers.items()},
        foreign_gone=tuple(turn.memory.gone),
    )
    turn.state = replace(turn.state, memory=memory, sums={}, summed={}, lead_tells={}, confirming=frozenset())
    turn.state = replace(turn.state, holds=frozenset(), untold={})
    turn.actions.append(TellForkServer(message=Forget(task="")))
    for worker in sorted(memory.workers):
        stopping.stop(turn, turn.memory.workers[worker], "the log that started it is gone")
