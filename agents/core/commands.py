"""Carries out commands: refuses stale and repeated ones, hands the others on, and injects the faults that people order.

Rules (the others: machine.py)
------------------------------
* A worker's kill or stop at once is a signal; a fault that waits for an iteration or a phase, and every fault inside
  the training loop, is for the worker: it receives `InjectIntoWorker`, and injects the fault at its next chance.
* A node's fault (no worker named) and an xid are for the shell (node_faults.py).
* A fault for a worker that has ended, or is not connected, is refused: it would hit another worker, or come later.
"""

from __future__ import annotations

import signal
from typing import assert_never

from msgspec.structs import replace

from unicrond.agents.core import joining, memberships, starting, stopping
from unicrond.agents.core import stored_states as kept_states
from unicrond.agents.core.state import (
    Action,
    Checked,
    Commanded,
    InjectIntoNode,
    LogDecision,
    PendingCommand,
    RunCheck,
    TellForkServer,
    TellWorker,
    Unreadable,
    WorkerRecord,
)
from unicrond.agents.core.transaction import MAX_TEXT, UNREAD, Transition
from unicrond.agents.protocol.messages import InjectIntoWorker, Kill
from unicrond.events.vocabulary import (
    CheckNode,
    DropState,
    Fault,
    InjectFault,
    LeaveCluster,
    MembershipDecided,
    MembershipPart,
    NodeChecked,
    PeersDecided,
    ProbeLinks,
    StartWorker,
    StartWorkers,
    StopWorker,
)
from unicrond.events.vocabulary.placements import starts


def commanded(transition: Transition, delivery: Commanded) -> None:  # noqa: C901  # one case for each kind of command
    """Carry out a command to this node: once, and none older than the newest that was carried out.

    One for a newer agent is left to that agent, unanswered.
    """
    command = delivery.command
    if command.node != transition.config.node or command.agent_boot > transition.config.agent_boot:
        return
    if isinstance(command, StartWorkers):
        for start in starts(command):
            commanded(transition, replace(delivery, command=start))
        return
    order = PendingCommand(command_id=command.command_id, cause=delivery.cause)
    if order.command_id in transition.memory.answers:
        transition.say_answer(order)
        return
    if is_pending(transition, order.command_id):
        return
    if 0 < command.agent_boot < transition.memory.since_boot:
        transition.answer(order, "stale: it was for an agent whose run directory is lost; that agent may have obeyed")
        return
    if isinstance(command, StartWorker | CheckNode) and starting.is_void(transition, command):
        transition.answer(order, starting.VOID)
        return
    fence = (delivery.term, command.epoch)
    if fence < transition.memory.fence:
        term, epoch = transition.memory.fence
        transition.answer(order, f"stale: term {delivery.term} epoch {command.epoch}, this node obeys {term} {epoch}")
        return
    if fence > transition.memory.fence:
        transition.remember(fence=fence)
    match command:
        case StartWorker() | InjectFault() | CheckNode() | ProbeLinks() if (
            delivery.age_s > transition.config.start_max_age_s
        ):
            transition.answer(
                order,
                f"stale: commanded {delivery.age_s:.0f} s ago, this node acts within "
                f"{transition.config.start_max_age_s:g} s (if it is not that old, "
                "the clocks of this node and of the log differ)",
            )
        case StartWorker():
            starting.start(transition, command, order)
        case StopWorker():
            stopping.stop_commanded(transition, command, order)
        case InjectFault(fault=fault):
            inject(transition, fault, order)
        case CheckNode():
            check(transition, command, order)
        case ProbeLinks():
            transition.actions.append(command)
            transition.answer(order)
        case LeaveCluster():
            leave(transition, command, order)
        case DropState(task=task):
            kept_states.drop_state(transition, task, order)
        case _ as never:
            assert_never(never)


def leave(transition: Transition, command: LeaveCluster, order: PendingCommand) -> None:
    """Leave for good, drained; or, for a node that was forgotten while it was away, end what runs here."""
    transition.answer(order)
    transition.state = replace(transition.state, ends="for good" if command.for_good else "forgotten")
    if command.for_good:
        reason = f"it was told to leave for good: {command.reason}"
        joining.drain(transition, reason, command.limit_us / 1e6, has_log=True)
    else:
        joining.leave(transition, f"the node was forgotten: {command.reason}")


def apply_decision(transition: Transition, decision: LogDecision) -> None:
    """Apply a membership or peers from the log, unless the node has seen a newer term."""
    if decision.term < transition.memory.fence[0]:
        return
    if decision.term > transition.memory.fence[0]:
        transition.remember(fence=(decision.term, 0))
    match decision.event:
        case MembershipPart() as part:
            memberships.take_part(transition, part, decision.term)
        case MembershipDecided() as decided:
            memberships.decided(transition, decided, decision.term, decision.warrant)
        case PeersDecided() if 0 < decision.seq <= transition.memory.read_seq:
            pass  # it comes again, and a membership with other peers may have come since
        case PeersDecided(task=task, peers=peers):
            kept_states.set_peers(transition, task, peers)
        case _:
            pass  # from a younger coordinator, which knows that this agent cannot read it


def unreadable(transition: Transition, unread: Unreadable) -> None:
    """Refuse a command that cannot be read; if it has been answered already, repeat the answer."""
    order = PendingCommand(command_id=unread.command_id, cause=unread.cause)
    if order.command_id in transition.memory.answers:
        transition.say_answer(order)
    else:
        transition.answer(order, f"{UNREAD}{unread.reason}")


def is_pending(transition: Transition, command_id: str) -> bool:
    """Return whether the command has been accepted and not answered yet."""
    starts = [w.order for w in transition.memory.waiting_starts]
    starts += [w.starting.order for w in transition.memory.workers.values() if w.starting]
    stops = [o for w in transition.memory.workers.values() for o in w.stop_orders]
    checking = transition.state.checking
    if checking is not None and checking.command_id == command_id:
        return True
    return command_id in transition.state.injecting or any(order.command_id == command_id for order in starts + stops)


def inject(transition: Transition, fault: Fault, order: PendingCommand) -> None:
    """Inject a fault that a person has ordered, into the node or one of its workers."""
    if _is_node_fault(fault):
        if fault.kind == "kill":
            transition.answer(order)
        else:
            transition.state = replace(
                transition.state, injecting={**transition.state.injecting, order.command_id: order}
            )
        transition.actions.append(InjectIntoNode(fault=fault, command_id=order.command_id))
        return
    record = transition.memory.workers.get(fault.worker)
    action = _worker_fault(fault, record, is_connected=transition.is_connected(fault.worker))
    if isinstance(action, str):
        transition.answer(order, action)
    else:
        transition.actions.append(action)
        transition.answer(order)


def injected(transition: Transition, command_id: str, reason: str) -> None:
    """Answer an ordered fault on the node. `reason`: why it could not be injected, "" where it was."""
    order = transition.state.injecting.get(command_id)
    if order is not None:
        transition.state = replace(
            transition.state, injecting={c: o for c, o in transition.state.injecting.items() if c != command_id}
        )
        transition.answer(order, reason)


def check(transition: Transition, command: CheckNode, order: PendingCommand) -> None:
    """Start a check of the node's health; one check at a time, another is refused."""
    if transition.state.checking is not None:
        transition.answer(order, "another check is under way")
        return
    transition.state = replace(transition.state, checking=order)
    transition.actions.append(
        RunCheck(
            command_id=order.command_id,
            argv=command.argv,
            limit_s=command.limit_us / 1e6,
            reason=command.reason,
        )
    )


def checked(transition: Transition, outcome: Checked) -> None:
    """Append the result of the ordered check."""
    order = transition.state.checking
    if order is None or order.command_id != outcome.command_id:
        return
    transition.state = replace(transition.state, checking=None)
    transition.append(
        NodeChecked(
            node=transition.config.node,
            command_id=outcome.command_id,
            has_passed=outcome.has_passed,
            duration_us=outcome.duration_us,
            detail=outcome.detail[:MAX_TEXT],
        ),
        order.cause,
    )
    transition.answer(order)


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def _is_node_fault(fault: Fault) -> bool:
    """Return whether it is a fault of the node, not of one of its workers."""
    return not fault.worker or fault.kind in ("xid", "drop_network")


def _worker_fault(fault: Fault, record: WorkerRecord | None, *, is_connected: bool) -> Action | str:
    """Return the action for a worker's fault; a text says why there is none."""
    if record is None or not record.pid or record.foreign:
        return f"no worker {fault.worker} runs here"
    if record.stop != "no":
        return f"worker {fault.worker} is about to end anyway"
    if fault.kind in _SIGNALS and not fault.at_iteration and not fault.phase:
        return TellForkServer(message=Kill(worker=fault.worker, signal=_SIGNALS[fault.kind]))
    if not is_connected:
        return f"worker {fault.worker} is not connected; try again in a moment"
    return TellWorker(worker=fault.worker, message=InjectIntoWorker(fault=fault))
