"""Takes a member from one group to the next with its state, or out of training.

What the verdict says (`verdict.py`) is carried out here: which members step first, who gives state to whom, what is
computed again, and which parts of sharded optimizer state each member holds from now on.
"""

from __future__ import annotations

from typing import NoReturn

from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.trainer.lifecycle.effects import (
    AwaitQuit,
    BroadcastState,
    DropParts,
    FaultPoint,
    Flow,
    GroupReady,
    Idle,
    KeepSums,
    Log,
    ReceiveState,
    Send,
    SetPhase,
)
from unicrond.agents.trainer.lifecycle.member_state import (
    MemberState,
    PendingWork,
    begin_iteration,
    leave_broken_group,
    report_commit,
    start_clock,
)
from unicrond.agents.trainer.lifecycle.membership_choice import NotAMember, join
from unicrond.agents.trainer.lifecycle.optimizer_state import divide, gather
from unicrond.agents.trainer.lifecycle.results import (
    NO_SAVE,
    GroupBroken,
    MembershipSuperseded,
    QuitRequested,
    RendezvousTimedOut,
)
from unicrond.agents.trainer.lifecycle.saving import save_and_wait
from unicrond.agents.trainer.lifecycle.shares import Shares, assign_parts, nodes_of
from unicrond.agents.trainer.lifecycle.state_search import adopt_state, find_state, report_loaded
from unicrond.agents.trainer.lifecycle.verdict import GroupVerdict
from unicrond.events.vocabulary import StateSource, WorkerJoinedGroup, WorkerPaused


def regroup(member: MemberState, target: GroupMembership | None = None) -> Flow[bool]:
    """Join the next group, state included. Return True where this member steps first, with the sums that are
    complete."""
    while True:
        member.enter("regrouping")
        yield from SetPhase("regroup")
        yield from Idle()
        member.pending_work, member.target, member.save_schedule = None, 0, NO_SAVE
        member.stop_agreed = False  # the next group agrees on it anew
        try:
            membership, verdict = yield from join(member, target)
        except NotAMember as left_out:
            yield from _wait_for_quit(member, left_out.membership)
        except RendezvousTimedOut as stranded:
            yield from _give_up(member, stranded)
        target = None
        duration_us = yield from _enter_group(member, membership, verdict)
        member.pending_work = pending_work = PendingWork(
            verdict, transfer_pending=bool(verdict.receivers) or member.shares is not None
        )
        if (yield from _apply(member, pending_work)):
            yield from _report_regrouped(member, verdict, duration_us, "own")
            return True
        origin: StateSource = "own"
        failure = ""
        try:
            if pending_work.transfer_pending:
                origin = yield from transfer(member, pending_work)
        except MembershipSuperseded:
            continue
        except GroupBroken as broken:
            failure = str(broken)
        if failure:
            yield from leave_broken_group(member, failure, "regroup")
            continue
        yield from _report_regrouped(member, verdict, duration_us, origin)
        return False


def _enter_group(member: MemberState, membership: GroupMembership, verdict: GroupVerdict) -> Flow[int]:
    member.membership = membership
    member.dealing.begin(verdict.factors)
    member.has_whole_state = False  # what was assembled was for saving in the group before
    member.stop_reason = member.stop_reason or membership.stop
    replicas = len({peer.replica for peer in membership.members})
    return (yield from GroupReady(membership, -(-member.micro_batches // replicas)))


def _apply(member: MemberState, pending_work: PendingWork) -> Flow[bool]:
    """Act on the verdict as far as this member's own state goes; the transfer comes later. Return True for: step
    first."""
    verdict, rank = pending_work.verdict, member.rank
    if member.shares is not None:
        member.shares.layout = list(verdict.shares)
        if verdict.fresh:
            yield from _discard_state(member)
    if rank in verdict.step_first:
        pending_work.assigns_next = True
        return True
    member.total = None
    if rank in verdict.receivers:
        member.has_state = member.has_stepped = False  # the others have gone on without it, if it had any
        yield from begin_iteration(member, verdict.iteration)
        member.assign(verdict)
    else:
        yield from KeepSums(verdict.final, verdict.valid_sums(rank))
        if verdict.final:
            text = f"{len(verdict.final)} of {member.buckets} buckets are final"
            yield from Log(f"iteration {verdict.iteration} goes on, {text}")
        member.assign(verdict, repeated=bool(member.ledger.assignment))
    return False


def _discard_state(member: MemberState) -> Flow[None]:
    """Discard this member's state, if it has any: all members have lost theirs, so it is only a part."""
    if member.has_state:
        yield from Log("all holders of a part of the state are lost")
    yield from DropParts()
    member.has_state = member.has_stepped = False


# --- bringing everybody to the verdict's iteration -----------------------------------------------


def transfer(member: MemberState, pending_work: PendingWork) -> Flow[StateSource]:
    """Transfer parameters that others have stepped, state for members without any, and its parts to each. Throws
    GroupBroken, MembershipSuperseded."""
    member.enter("transferring")
    verdict, shares = pending_work.verdict, member.shares
    if shares is not None and verdict.step_first and member.rank not in verdict.step_first:
        yield from gather(shares)
    origin: StateSource = "own"
    if verdict.receivers:
        origin = yield from _exchange_state(member, verdict)
    if shares is not None and member.membership is not None:
        new_parts = assign_parts(nodes_of(member.membership))
        yield from divide(member, shares, new_parts, first=verdict.fresh and member.origin == "init")
    pending_work.transfer_pending = False
    return origin


def _exchange_state(member: MemberState, verdict: GroupVerdict) -> Flow[StateSource]:
    """Give the state, receive it, or take part while the source's is broadcast; return its origin."""
    rank, started_s = member.rank, member.clock()
    source = (yield from find_state(member)) if verdict.fresh else verdict.source
    yield from FaultPoint("giving", member.ledger.iteration, member.ledger.finished)
    if rank == source:
        yield from BroadcastState(member.last_iteration, member.loss, member.origin)
    else:
        loaded = yield from ReceiveState(source, rank in verdict.receivers)
        if loaded is not None:
            yield from adopt_state(member, loaded)
            member.origin = loaded.origin if verdict.fresh else "replica"
            if not verdict.fresh:
                yield from report_loaded(member, "replica", loaded, started_s)
    if member.shares is not None and verdict.fresh:
        _note_source_has_all(member.shares, source, len(member.peers))
    return member.origin if rank in verdict.receivers or verdict.fresh else "own"


def _note_source_has_all(shares: Shares, source: int, size: int) -> None:
    shares.layout = [()] * size
    shares.layout[source] = [(0, shares.total)]


def _report_regrouped(member: MemberState, verdict: GroupVerdict, duration_us: int, source: StateSource) -> Flow[None]:
    if source != "own":
        member.boundary_s = member.clock()
    yield from start_clock(member)
    yield from Send(
        WorkerJoinedGroup(
            **member.launch.reporter,
            generation=member.generation,
            iteration=member.ledger.iteration,
            micro_batches_assigned=member.ledger.repeated,
            duration_us=duration_us,
            source=source,
            micro_batches_assigned_elsewhere=sum(verdict.repeated) - verdict.repeated[member.rank]
            if verdict.repeated
            else 0,
        )
    )
    yield from report_commit(member)


# --- out of training -----------------------------------------------------------------------------


def _wait_for_quit(member: MemberState, target: GroupMembership) -> Flow[NoReturn]:
    """Report that this worker is no longer a member, and wait to be ended. Its last group stays open
    (`membership_choice.py`). Where no member stays, the leader's replica is the last that can save the state: to
    memory, where others are about to take it from there, else to storage.
    """
    member.enter("parked")
    present = () if member.membership is None else member.membership.members
    staying = {peer.worker for peer in present}.intersection(peer.worker for peer in target.members)
    if member.has_state and not staying and member.in_leader_replica:
        yield from save_and_wait(member, handover=target.handover)
    yield from Send(
        WorkerPaused(**member.launch.reporter, generation=target.generation, iteration=member.last_iteration)
    )
    yield from AwaitQuit()
    raise QuitRequested


def _give_up(member: MemberState, timeout: RendezvousTimedOut) -> Flow[NoReturn]:
    """Save what there is, and end: no membership came in time."""
    member.enter("stranded")
    yield from Log(f"{timeout}; saving and ending")
    if member.has_state:
        yield from save_and_wait(member)
    raise timeout
