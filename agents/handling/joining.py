"""Joining and leaving: the node, and the log that it belongs to. Rules: core.py."""

from __future__ import annotations

from msgspec.structs import replace

from agents.handling import commits, kept_states, starting, stopping
from agents.handling.turn import MAX_TEXT, Turn
from agents.known_log import difference
from agents.protocol.messages import Forget
from agents.state import ArmTimer, Finish, ForgetLog, LogSeen, MachineSaw, Remembered, TellForkServer
from events.vocabulary import (
    MachineReported,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    PeersRemembered,
    RunningWorker,
    StoreAddress,
)


def join_if_complete(turn: Turn) -> None:
    """Join once the log has been seen, the store runs and every adopted worker has been heard."""
    state = turn.state
    if state.phase == "adopting" and state.log_seen and state.store_port and not state.unheard:
        turn.state = replace(turn.state, phase="up")
        join(turn)
        if state.drain_s is not None:
            begin_drain(turn, state.drain_s)


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
            users=tuple(user.name for user in config.users),
            since_boot=turn.memory.since_boot,
            gpu=config.gpu,
        )
    )
    if turn.state.machine is not None:
        _tell_machine(turn, turn.state.machine)
    members = [w for _, w in sorted(turn.memory.workers.items()) if w.pid and w.member and not w.foreign]
    for task in dict.fromkeys(worker.task for worker in members):
        membership = turn.memory.memberships.get(task)
        peers = tuple(peer.node for peer in membership.peers) if membership else ()
        turn.append(PeersRemembered(node=config.node, task=task, peers=peers))
    for held in turn.state.untold.values():
        if held is not None:
            kept_states.tell_held(turn, held)


def machine_saw(turn: Turn, saw: MachineSaw) -> None:
    """Tell the log, once for each change; a node that has not joined tells it when it does."""
    if saw == turn.state.machine:
        return
    turn.state = replace(turn.state, machine=saw)
    if turn.state.phase == "up":
        _tell_machine(turn, saw)


def _tell_machine(turn: Turn, saw: MachineSaw) -> None:
    turn.append(MachineReported(node=turn.config.node, hold=saw.hold, reason=saw.reason[:MAX_TEXT]))


def drain(turn: Turn, reason: str, limit_s: float) -> None:
    """Leave once the coordinator has moved the workers away, after `limit_s` anyhow. A second call does nothing; a node
    that has not joined yet joins first, if workers run on it."""
    if turn.state.drain_s is not None or turn.state.phase in ("leaving", "left"):
        return
    if turn.state.phase == "adopting" and not (turn.memory.workers or turn.memory.waiting):
        leave(turn, reason)
        return
    turn.state = replace(turn.state, drain_s=limit_s, leave_reason=reason[:MAX_TEXT])
    turn.actions.append(ArmTimer(name="drain", key="", after_s=limit_s))
    if turn.state.phase == "up":
        begin_drain(turn, limit_s)


def begin_drain(turn: Turn, limit_s: float) -> None:
    """Announce the end. The log has that before it has the starts that are given up."""
    turn.state = replace(turn.state, phase="draining")
    grace_us, reason = round((limit_s + turn.config.kill_after_s) * 1e6), turn.state.leave_reason
    turn.append(NodeLeaving(node=turn.config.node, grace_us=grace_us, reason=reason))
    for waiting in turn.memory.waiting:
        starting.give_up_start(turn, waiting, "the node is leaving")
    leave_if_empty(turn)


def end_drain(turn: Turn) -> None:
    """The time is over: what still runs is ended."""
    if turn.state.phase in ("leaving", "left"):
        return
    turn.state = replace(turn.state, phase="leaving")
    for waiting in turn.memory.waiting:
        starting.give_up_start(turn, waiting, "the node is leaving")
    for record in sorted(turn.memory.workers.values(), key=lambda worker: worker.worker):
        if record.stop in ("no", "quit"):
            why = f"it did not leave its group within {turn.state.drain_s:g} s: {turn.state.leave_reason}"
            stopping.press(turn, turn.change(record, stop="term", stop_reason=why[:MAX_TEXT]))
    leave_if_empty(turn)


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
    """Append NodeLeft and finish, if the node is to leave and its last worker is gone. A newcomer that has not come to
    see the log has not joined: it has nothing to leave, and an older agent of its name may be at work."""
    if turn.state.phase not in ("draining", "leaving") or turn.memory.workers:
        return
    commits.close_all_sums(turn)
    turn.state = replace(turn.state, phase="left")
    if turn.state.log_seen or turn.memory.log:
        turn.append(NodeLeft(node=turn.config.node, reason=turn.state.leave_reason))
    turn.actions.append(Finish())


def log_seen(turn: Turn, seen: LogSeen) -> None:
    """The log answers. Another one than the known one makes all workers foreign, and the node joins it anew."""
    is_another = bool(difference(turn.memory, seen))
    if is_another:
        forget_log(turn)
    if seen.identity:
        taken_us = max(turn.memory.log_taken_us, seen.taken_us)
        if (seen.identity, seen.last_seq, taken_us) != (turn.memory.log, turn.memory.log_seq, turn.memory.log_taken_us):
            turn.remember(log=seen.identity, log_seq=seen.last_seq, log_taken_us=taken_us)
    turn.state = replace(turn.state, log_seen=True)
    if is_another and turn.state.phase == "up":
        join(turn)
    join_if_complete(turn)


def forget_log(turn: Turn) -> None:
    """Forget all that belongs to another log, and stop its workers."""
    memory = Remembered(
        since_boot=turn.memory.since_boot,
        log_taken_us=turn.memory.log_taken_us,
        workers={w: replace(record, foreign=True) for w, record in turn.memory.workers.items()},
        foreign_gone=tuple(turn.memory.gone),
    )
    turn.state = replace(turn.state, memory=memory, sums={}, summed={}, lead_tells={}, confirming=frozenset())
    turn.state = replace(turn.state, holds=frozenset(), untold={})
    turn.actions += [ForgetLog(), TellForkServer(message=Forget(task=""))]
    for worker in sorted(memory.workers):
        stopping.stop(turn, turn.memory.workers[worker], "the log that started it is gone")
