"""Sends each task's newest membership to its workers on this node. Rules: machine.py."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.agents.core import stopping
from unicrond.agents.core.state import MAX_TASKS, TellWorker, WorkerRecord
from unicrond.agents.core.transaction import Transition, newest_of
from unicrond.agents.protocol.messages import GroupMembership
from unicrond.events.queries.worker_queries import WarrantRenewal
from unicrond.events.trust.membership_digest import place_of
from unicrond.events.vocabulary import Member, MembershipDecided, MembershipPart, SeatRun, WorkerJoinedGroup
from unicrond.events.vocabulary.placements import PartialMembership, add_part, broadcast_seats, joiners_of, members_of


def take_part(transition: Transition, part: MembershipPart, term: int) -> None:
    """Store a part until its membership is decided."""
    _keep_telling(transition, part.task, add_part(transition.memory.membership_parts.get(part.task), part, term))


def decided(transition: Transition, event: MembershipDecided, term: int, warrant: str = "") -> None:
    """Store the membership and send it to the task's workers. An older one changes nothing, nor an incomplete one."""
    seats = broadcast_seats(transition.memory.membership_parts.get(event.task), event, term)
    _keep_telling(transition, event.task, None)
    newest = transition.memory.memberships.get(event.task)
    if seats is None or (newest and event.generation <= newest.generation):
        return
    generations = {**transition.state.leader_confirms, event.task: event.generation if event.leader_confirms else 0}
    transition.state = replace(transition.state, leader_confirms=newest_of(generations, MAX_TASKS))
    if event.takes_stacks:
        stopping.take_members_stacks(transition, event.task, event.generation)
    _keep(transition, event, seats, warrant)


def renewed(transition: Transition, renewal: WarrantRenewal) -> None:
    """Store the new warrant of the task's present membership; that of another changes nothing."""
    membership = transition.memory.memberships.get(renewal.task)
    if membership is None or membership.generation != renewal.generation:
        return
    warrant = _warrant_here(transition, renewal.task, membership.members, renewal.warrant)
    transition.remember(
        memberships={**transition.memory.memberships, renewal.task: replace(membership, warrant=warrant)}
    )


def to_report(transition: Transition, record: WorkerRecord, report: WorkerJoinedGroup) -> WorkerJoinedGroup | None:
    """Return the report that a member is in its group as it is to be appended; None where the leader's stands for
    it."""
    membership = transition.memory.memberships.get(record.task)
    if membership is None or not membership.generation == report.generation == transition.state.leader_confirms.get(
        record.task
    ):
        return replace(report, micro_batches_assigned_elsewhere=0)
    if membership.members[0].worker == record.worker:
        return report
    keeps_state = report.source == "own" and record.worker not in membership.joiners
    return None if keeps_state else replace(report, micro_batches_assigned_elsewhere=0)


def _keep(transition: Transition, event: MembershipDecided, seats: tuple[SeatRun, ...], warrant: str) -> None:
    members = members_of(event.task, seats, event.size)
    membership = GroupMembership(
        generation=event.generation,
        members=members,
        joiners=joiners_of(event.task, seats),
        urgent=event.urgent,
        store=event.store,
        peers=event.peers,
        mtbf_us=event.mtbf_us,
        handover=event.handover,
        stop=event.stop,
        storage_iteration=event.storage_iteration,
        warrant=_warrant_here(transition, event.task, members, warrant),
    )
    rest = {task: m for task, m in transition.memory.memberships.items() if task != event.task}
    transition.remember(memberships=newest_of({**rest, event.task: membership}, MAX_TASKS))
    for worker in sorted(transition.memory.workers):
        tell_membership(transition, transition.memory.workers[worker])


def _warrant_here(transition: Transition, task: str, members: tuple[Member, ...], warrant: str) -> str:
    """Return the warrant with this node's place.

    A node that has left keeps the earlier warrant: its last worker's capture is still to be copied.
    """
    place = place_of(transition.config.node, (member.node for member in members)) if warrant else ""
    newest = transition.memory.memberships.get(task)
    return f"{warrant}.{place}" if place else newest.warrant if newest else ""


def _keep_telling(transition: Transition, task: str, telling: PartialMembership | None) -> None:
    """Store the parts that have come of the task's next membership."""
    if telling is None and task not in transition.memory.membership_parts:
        return
    rest = {name: partial for name, partial in transition.memory.membership_parts.items() if name != task}
    transition.remember(membership_parts=newest_of({**rest, **({task: telling} if telling else {})}, MAX_TASKS))


def tell_membership(transition: Transition, record: WorkerRecord) -> None:
    """Send a worker its task's newest membership, if that concerns it and it has not received it yet."""
    membership = transition.memory.memberships.get(record.task)
    if membership is None:
        return
    is_member = any(member.worker == record.worker for member in membership.members)
    if not is_member and not record.member:
        return  # a newcomer that waits for a later membership
    if not record.member:
        record = transition.change(record, member=True)
    link = transition.state.links.get(record.worker)
    if link and link.connected and link.sent_generation < membership.generation:
        transition.link(record.worker, replace(link, sent_generation=membership.generation))
        transition.actions.append(TellWorker(worker=record.worker, message=membership))
