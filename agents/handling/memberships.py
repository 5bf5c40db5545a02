"""Memberships: the newest one of each task, told to whom it concerns. Rules: core.py."""

from __future__ import annotations

from msgspec.structs import replace

from agents.handling.turn import Turn, newest_of
from agents.protocol.messages import Membership
from agents.state import MAX_TASKS, Order, TellWorker, Worker
from events.vocabulary import SetMembership


def set_membership(turn: Turn, command: SetMembership, order: Order) -> None:
    """Keep the membership and tell it to the task's workers; an older one than the known is refused."""
    newest = turn.memory.memberships.get(command.task)
    if newest and command.generation < newest.generation:
        turn.answer(order, f"old generation {command.generation}: {newest.generation} is already known")
        return
    membership = Membership(
        generation=command.generation,
        members=command.members,
        joiners=command.joiners,
        urgent=command.urgent,
        store=command.store,
        peers=command.peers,
        mtbf_us=command.mtbf_us,
        handover=command.handover,
        stop=command.stop,
    )
    others = {task: m for task, m in turn.memory.memberships.items() if task != command.task}
    turn.remember(memberships=newest_of({**others, command.task: membership}, MAX_TASKS))
    for worker in sorted(turn.memory.workers):
        tell_membership(turn, turn.memory.workers[worker])
    turn.answer(order)


def tell_membership(turn: Turn, record: Worker) -> None:
    """Give a worker its task's newest membership, if that concerns it and it has not got it yet."""
    membership = turn.memory.memberships.get(record.task)
    if membership is None:
        return
    is_member = any(member.worker == record.worker for member in membership.members)
    if not is_member and not record.member:
        return  # a newcomer that waits for a later membership
    if not record.member:
        record = turn.change(record, member=True)
    link = turn.state.links.get(record.worker)
    if link and link.connected and link.told < membership.generation:
        turn.link(record.worker, replace(link, told=membership.generation))
        turn.actions.append(TellWorker(worker=record.worker, message=membership))
