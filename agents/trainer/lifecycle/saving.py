"""Saves the last committed state to memory and storage, by effects."""

from __future__ import annotations

from unicrond.agents.trainer.lifecycle.effects import Flow, Log, ReportHoldings, Save, SaveAndWait, SetPhase
from unicrond.agents.trainer.lifecycle.member_state import MemberState
from unicrond.agents.trainer.lifecycle.optimizer_state import assemble
from unicrond.agents.trainer.lifecycle.results import NO_SAVE


def save(member: MemberState, iteration: int, duration_us: int) -> Flow[None]:
    """Save what is due after `iteration`, which took `duration_us`. Throws GroupBroken, MembershipSuperseded."""
    membership = member.membership
    assert membership is not None
    yield from SetPhase("checkpoint")
    schedule = None
    if member.shares is not None:
        schedule, member.save_schedule = member.save_schedule, NO_SAVE
        if schedule.is_due or member.program_saves(iteration):
            yield from assemble(member, member.shares, at_boundary=True)
    yield from Save(iteration, duration_us, member.loss, membership, member.in_leader_replica, schedule)
    member.has_whole_state = False


def save_and_wait(member: MemberState, *, handover: bool = False) -> Flow[None]:
    """Have the last committed iteration on storage; all shards of the replica take part. `handover`: memory will do,
    where it has room. Not between its own step and the others' parameters: that is the state of no iteration."""
    if not member.last_iteration:
        return
    if member.has_stepped:
        yield from Log("this replica has stepped its own parts only: not saved")
        return
    yield from SetPhase("checkpoint")
    if member.shares is not None and not member.has_whole_state:
        spans = (yield from ReportHoldings()).spans
        if not member.shares.are_whole([spans]):
            yield from Log("this replica has parts of the state only: not saved")
            return
    yield from SaveAndWait(member.last_iteration, member.loss, handover)
