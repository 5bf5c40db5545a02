"""Joins the cluster and leaves it, and forgets a log that is not this cluster's. Rules: machine.py."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.agents.core import commits, last_saves, starting, stopping
from unicrond.agents.core import stored_states as kept_states
from unicrond.agents.core.known_event_log import difference
from unicrond.agents.core.state import ArmTimer, Finish, ForgetLog, LogSeen, MachineSaw, Remembered, TellForkServer
from unicrond.agents.core.transaction import MAX_TEXT, Transition
from unicrond.agents.protocol.messages import ReleaseMemory
from unicrond.events.vocabulary import (
    MachineReported,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    PeersRemembered,
    RunningWorker,
    StoreAddress,
)


def join_if_complete(transition: Transition) -> None:
    """Join once the log has been seen, the store runs and every adopted worker has connected."""
    state = transition.state
    if state.phase == "adopting" and state.log_seen and state.store_port and not state.unheard:
        transition.state = replace(transition.state, phase="up")
        join(transition)
        if state.drain_s is not None:
            begin_drain(transition, state.drain_s)


def join(transition: Transition) -> None:
    """Append NodeJoined with the workers that run here, and report the states in the node's memory."""
    config = transition.config
    running = [
        RunningWorker(worker=w.worker, task=w.task, pid=w.pid, generation=w.generation)
        for _, w in sorted(transition.memory.workers.items())
        if w.pid and not w.foreign
    ]
    transition.state = replace(transition.state, joined_port=transition.state.store_port)
    transition.append(
        NodeJoined(
            node=config.node,
            address=config.address,
            slots=config.slots,
            store=StoreAddress(host=config.address, port=transition.state.store_port),
            agent_boot=config.agent_boot,
            version=config.version,
            workers=tuple(running),
            memory=config.memory,
            users=tuple(user.name for user in config.users),
            gpu=config.gpu,
            probe_port=config.probe_port,
            domain=config.domain,
            object_stores=config.object_stores,
        )
    )
    if transition.state.machine is not None:
        _tell_machine(transition, transition.state.machine)
    members = [w for _, w in sorted(transition.memory.workers.items()) if w.pid and w.member and not w.foreign]
    for task in dict.fromkeys(worker.task for worker in members):
        membership = transition.memory.memberships.get(task)
        peers = tuple(peer.node for peer in membership.peers) if membership else ()
        transition.append(PeersRemembered(node=config.node, task=task, peers=peers))
    for snapshot in transition.state.untold.values():
        if snapshot is not None:
            kept_states.tell_held(transition, snapshot)


def machine_saw(transition: Transition, saw: MachineSaw) -> None:
    """Report the keeper's demand to the log, once for each change; a node that has not joined reports it when it
    does."""
    if saw == transition.state.machine:
        return
    transition.state = replace(transition.state, machine=saw)
    if transition.state.phase == "up":
        _tell_machine(transition, saw)


def _tell_machine(transition: Transition, saw: MachineSaw) -> None:
    transition.append(MachineReported(node=transition.config.node, hold=saw.hold, reason=saw.reason[:MAX_TEXT]))


def drain(transition: Transition, reason: str, limit_s: float, *, has_log: bool) -> None:
    """Leave once the coordinator has moved the workers away, after `limit_s` anyhow. Where it does not, they save first
    (last_saves.py).

    A second call does nothing; a node that has not joined yet joins first, if workers run on it.
    """
    if transition.state.drain_s is not None or transition.state.phase in ("leaving", "left"):
        return
    if transition.state.phase == "adopting" and not (transition.memory.workers or transition.memory.waiting_starts):
        leave(transition, reason)
        return
    transition.state = replace(transition.state, drain_s=limit_s, leave_reason=reason[:MAX_TEXT])
    transition.actions.append(ArmTimer(name="drain", key="", after_s=limit_s))
    last_saves.arm(transition, limit_s)
    if transition.state.phase == "up":
        begin_drain(transition, limit_s)
    if not has_log:
        last_saves.order(transition, "boundary")


def begin_drain(transition: Transition, limit_s: float) -> None:
    """Announce the node's end. The log receives that before it receives the starts that are given up."""
    transition.state = replace(transition.state, phase="draining")
    grace_us, reason = round((limit_s + transition.config.kill_after_s) * 1e6), transition.state.leave_reason
    transition.append(NodeLeaving(node=transition.config.node, grace_us=grace_us, reason=reason))
    for waiting in transition.memory.waiting_starts:
        starting.give_up_start(transition, waiting, "the node is leaving")
    leave_if_empty(transition)


def end_drain(transition: Transition) -> None:
    """Stop the workers that still run when the time for the drain is over."""
    if transition.state.phase in ("leaving", "left"):
        return
    transition.state = replace(transition.state, phase="leaving")
    for waiting in transition.memory.waiting_starts:
        starting.give_up_start(transition, waiting, "the node is leaving")
    for record in sorted(transition.memory.workers.values(), key=lambda worker: worker.worker):
        if record.stop in ("no", "quit"):
            stop_reason = (
                f"it did not leave its group within {transition.state.drain_s:g} s: {transition.state.leave_reason}"
            )
            stopping.press(transition, transition.change(record, stop="term", stop_reason=stop_reason[:MAX_TEXT]))
    leave_if_empty(transition)


def leave(transition: Transition, reason: str) -> None:
    """Stop all workers, give up all starts, and leave when nothing runs here any more. A second call does nothing."""
    if transition.state.phase in ("leaving", "left"):
        return
    transition.state = replace(transition.state, phase="leaving", leave_reason=reason[:MAX_TEXT])
    for waiting in transition.memory.waiting_starts:
        starting.give_up_start(transition, waiting, "the node is leaving")
    for worker in sorted(transition.memory.workers):
        stopping.stop(transition, transition.memory.workers[worker], f"the node is leaving: {reason}")
    leave_if_empty(transition)


def leave_if_empty(transition: Transition) -> None:
    """Append NodeLeft and finish, if the node is to leave and its last worker has ended.

    A newcomer that has not seen the log yet has not joined: it has nothing to leave, and an older agent of its name may
    be at work.
    """
    if transition.state.phase not in ("draining", "leaving") or transition.memory.workers:
        return
    commits.close_all_sums(transition)
    transition.state = replace(transition.state, phase="left")
    if transition.state.log_seen or transition.memory.log:
        transition.append(NodeLeft(node=transition.config.node, reason=transition.state.leave_reason))
    transition.actions.append(Finish())


def log_seen(transition: Transition, log: LogSeen) -> None:
    """Note that the log answers. If it is not the known one, all workers become foreign, and the node joins it anew."""
    is_another = bool(difference(transition.memory, log))
    if is_another:
        forget_log(transition)
    if log.created:
        memory = transition.memory
        adopted_us = max(memory.log_adopted_us, log.adopted_us)
        notes = (log.created, log.last_seq, log.marks, adopted_us)
        if notes != (memory.log, memory.log_seq, memory.log_marks, memory.log_adopted_us):
            transition.remember(log=log.created, log_seq=log.last_seq, log_marks=log.marks, log_adopted_us=adopted_us)
    transition.state = replace(transition.state, log_seen=True)
    if is_another and transition.state.phase == "up":
        join(transition)
    join_if_complete(transition)


def forget_log(transition: Transition) -> None:
    """Forget all that belongs to another log, and stop its workers."""
    memory = Remembered(
        since_boot=transition.memory.since_boot,
        log_adopted_us=transition.memory.log_adopted_us,
        workers={w: replace(record, foreign=True) for w, record in transition.memory.workers.items()},
        foreign_workers=tuple(transition.memory.ended_workers),
    )
    transition.state = replace(
        transition.state, memory=memory, sums={}, summed={}, leader_confirms={}, confirming=frozenset()
    )
    transition.state = replace(transition.state, holds=frozenset(), untold={})
    transition.actions += [ForgetLog(), TellForkServer(message=ReleaseMemory(task=""))]
    for worker in sorted(memory.workers):
        stopping.stop(transition, transition.memory.workers[worker], "the log that started it is gone")
