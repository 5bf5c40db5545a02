"""Orders: commands are fenced, recognised and handed on; faults that people order. Rules: core.py."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from agents import ordered_faults
from agents.handling import joining, kept_states, memberships, starting, stopping
from agents.handling.turn import MAX_TEXT, UNREAD, Turn
from agents.state import Checked, Commanded, Order, RunCheck, Told, Unreadable
from events.seats import starts
from events.vocabulary import (
    CheckNode,
    DropState,
    Fault,
    InjectFault,
    LeaveCluster,
    MembershipDecided,
    MembershipPart,
    NodeChecked,
    PeersDecided,
    StartWorker,
    StartWorkers,
    StopWorker,
)


def commanded(turn: Turn, given: Commanded) -> None:  # noqa: C901  # one case for each kind of command
    """Obey a command to this node: once, and no older one than the newest that was obeyed. One for a newer agent is not
    answered: it is for that one."""
    command = given.command
    if command.node != turn.config.node or command.agent_boot > turn.config.agent_boot:
        return
    if isinstance(command, StartWorkers):
        for start in starts(command):
            commanded(turn, replace(given, command=start))
        return
    order = Order(command_id=command.command_id, cause=given.cause)
    if order.command_id in turn.memory.answered:
        turn.say_answer(order)
        return
    if is_pending(turn, order.command_id):
        return
    if 0 < command.agent_boot < turn.memory.since_boot:
        turn.answer(order, "stale: it was for an agent whose run directory is lost; that agent may have obeyed")
        return
    fence = (given.term, command.epoch)
    if fence < turn.memory.fence:
        term, epoch = turn.memory.fence
        turn.answer(order, f"stale: term {given.term} epoch {command.epoch}, this node obeys {term} {epoch}")
        return
    if fence > turn.memory.fence:
        turn.remember(fence=fence)
    match command:
        case StartWorker() | InjectFault() | CheckNode() if given.age_s > turn.config.start_max_age_s:
            turn.answer(
                order,
                f"stale: commanded {given.age_s:.0f} s ago, this node acts within {turn.config.start_max_age_s:g} s "
                "(if it is not that old, the clocks of this node and of the log differ)",
            )
        case StartWorker():
            starting.start(turn, command, order)
        case StopWorker():
            stopping.stop_commanded(turn, command, order)
        case InjectFault(fault=fault):
            inject(turn, fault, order)
        case CheckNode():
            check(turn, command, order)
        case LeaveCluster():
            leave(turn, command, order)
        case DropState(task=task):
            kept_states.drop_state(turn, task, order)
        case _ as never:
            assert_never(never)


def leave(turn: Turn, command: LeaveCluster, order: Order) -> None:
    """Leave for good, drained; or, forgotten while it was away, end what runs here."""
    turn.answer(order)
    turn.state = replace(turn.state, ends="for good" if command.for_good else "forgotten")
    if command.for_good:
        joining.drain(turn, f"it was told to leave for good: {command.reason}", command.limit_us / 1e6)
    else:
        joining.leave(turn, f"the node was forgotten: {command.reason}")


def told(turn: Turn, given: Told) -> None:
    """Obey a membership or peers from the log, unless the node has obeyed a newer term."""
    if given.term < turn.memory.fence[0]:
        return
    if given.term > turn.memory.fence[0]:
        turn.remember(fence=(given.term, 0))
    match given.event:
        case MembershipPart() as part:
            memberships.take_part(turn, part, given.term)
        case MembershipDecided() as decided:
            memberships.decided(turn, decided, given.term, given.warrant)
        case PeersDecided(task=task, peers=peers):
            kept_states.set_peers(turn, task, peers)
        case _:
            pass  # of a younger coordinator, which knows that this agent does not know it


def unreadable(turn: Turn, given: Unreadable) -> None:
    """Refuse a command that cannot be read; if it has been answered already, repeat the answer."""
    order = Order(command_id=given.command_id, cause=given.cause)
    if order.command_id in turn.memory.answered:
        turn.say_answer(order)
    else:
        turn.answer(order, f"{UNREAD}{given.reason}")


def is_pending(turn: Turn, command_id: str) -> bool:
    """Whether the command has been taken up and not answered yet."""
    starts = [w.order for w in turn.memory.waiting]
    starts += [w.starting.order for w in turn.memory.workers.values() if w.starting]
    stops = [o for w in turn.memory.workers.values() for o in w.stop_orders]
    checking = turn.state.checking
    if checking is not None and checking.command_id == command_id:
        return True
    return command_id in turn.state.injecting or any(order.command_id == command_id for order in starts + stops)


def inject(turn: Turn, fault: Fault, order: Order) -> None:
    """Let a fault happen that a person has ordered, on the node or on one of its workers."""
    if ordered_faults.is_of_node(fault):
        if fault.kind == "kill":
            turn.answer(order)
        else:
            turn.state = replace(turn.state, injecting={**turn.state.injecting, order.command_id: order})
        turn.actions.append(ordered_faults.on_node(fault, order.command_id))
        return
    record = turn.memory.workers.get(fault.worker)
    done = ordered_faults.on_worker(fault, record, is_connected=turn.is_connected(fault.worker))
    if isinstance(done, str):
        turn.answer(order, done)
    else:
        turn.actions.append(done)
        turn.answer(order)


def injected(turn: Turn, command_id: str, reason: str) -> None:
    """Answer an ordered fault on the node. `reason`: why it could not happen, "" where it did."""
    order = turn.state.injecting.get(command_id)
    if order is not None:
        turn.state = replace(turn.state, injecting={c: o for c, o in turn.state.injecting.items() if c != command_id})
        turn.answer(order, reason)


def check(turn: Turn, command: CheckNode, order: Order) -> None:
    """Check the node's health; one check at a time, another is refused."""
    if turn.state.checking is not None:
        turn.answer(order, "another check is under way")
        return
    turn.state = replace(turn.state, checking=order)
    turn.actions.append(
        RunCheck(
            command_id=order.command_id,
            argv=command.argv,
            limit_s=command.limit_us / 1e6,
            reason=command.reason,
        )
    )


def checked(turn: Turn, given: Checked) -> None:
    """Append the result of the check that was asked for."""
    order = turn.state.checking
    if order is None or order.command_id != given.command_id:
        return
    turn.state = replace(turn.state, checking=None)
    turn.append(
        NodeChecked(
            node=turn.config.node,
            command_id=given.command_id,
            passed=given.passed,
            duration_us=given.duration_us,
            detail=given.detail[:MAX_TEXT],
        ),
        order.cause,
    )
    turn.answer(order)
