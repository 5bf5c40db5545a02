"""Memberships: the newest one of each task, told to whom it concerns. Rules: core.py."""

from __future__ import annotations

from msgspec.structs import replace

from agents.handling.turn import Turn, newest_of
from agents.protocol.messages import Membership, Regrouped
from agents.state import MAX_TASKS, TellWorker, Worker
from events.roster import place_of
from events.seats import Telling, joiners_of, members_of, told_by, told_so_far
from events.vocabulary import Member, MembershipDecided, MembershipPart, SeatRun


def take_part(turn: Turn, part: MembershipPart, term: int) -> None:
    """Keep a part until its membership is decided."""
    _keep_telling(turn, part.task, told_so_far(turn.memory.tellings.get(part.task), part, term))


def decided(turn: Turn, event: MembershipDecided, term: int, warrant: str = "") -> None:
    """Keep the membership and tell it to the task's workers. An older one changes nothing, nor a torn one."""
    seats = told_by(turn.memory.tellings.get(event.task), event, term)
    _keep_telling(turn, event.task, None)
    newest = turn.memory.memberships.get(event.task)
    if seats is None or (newest and event.generation <= newest.generation):
        return
    generations = {**turn.state.lead_tells, event.task: event.generation if event.lead_tells else 0}
    turn.state = replace(turn.state, lead_tells=newest_of(generations, MAX_TASKS))
    _keep(turn, event, seats, warrant)


def to_report(turn: Turn, record: Worker, said: Regrouped) -> Regrouped | None:
    """What is to be reported of a member's word that it is in its group; None where the lead's word stands for it."""
    membership = turn.memory.memberships.get(record.task)
    if membership is None or not membership.generation == said.generation == turn.state.lead_tells.get(record.task):
        return replace(said, others_dealt=0)
    if membership.members[0].worker == record.worker:
        return said
    keeps_state = said.source == "own" and record.worker not in membership.joiners
    return None if keeps_state else replace(said, others_dealt=0)


def _keep(turn: Turn, said: MembershipDecided, seats: tuple[SeatRun, ...], warrant: str) -> None:
    members = members_of(said.task, seats, said.size)
    membership = Membership(
        generation=said.generation,
        members=members,
        joiners=joiners_of(said.task, seats),
        urgent=said.urgent,
        store=said.store,
        peers=said.peers,
        mtbf_us=said.mtbf_us,
        handover=said.handover,
        stop=said.stop,
        warrant=_warrant_here(turn, said.task, members, warrant),
    )
    others = {task: m for task, m in turn.memory.memberships.items() if task != said.task}
    turn.remember(memberships=newest_of({**others, said.task: membership}, MAX_TASKS))
    for worker in sorted(turn.memory.workers):
        tell_membership(turn, turn.memory.workers[worker])


def _warrant_here(turn: Turn, task: str, members: tuple[Member, ...], warrant: str) -> str:
    """With this node's place. A node that has left keeps the warrant of before: what its last worker captures is to be
    copied still."""
    place = place_of(turn.config.node, (member.node for member in members)) if warrant else ""
    newest = turn.memory.memberships.get(task)
    return f"{warrant}.{place}" if place else newest.warrant if newest else ""


def _keep_telling(turn: Turn, task: str, telling: Telling | None) -> None:
    """The parts that have come of the task's next membership."""
    if telling is None and task not in turn.memory.tellings:
        return
    others = {name: begun for name, begun in turn.memory.tellings.items() if name != task}
    turn.remember(tellings=newest_of({**others, **({task: telling} if telling else {})}, MAX_TASKS))


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
