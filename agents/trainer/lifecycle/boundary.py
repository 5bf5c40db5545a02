"""The boundary between two iterations: gather parameters, commit, save, and enter the group of the next iteration."""

from __future__ import annotations

from unicrond.agents.protocol.messages import GroupMembership, IterationCommitted
from unicrond.agents.trainer.lifecycle.effects import FaultPoint, Flow, GetMembership, Observe, PrepareStandby
from unicrond.agents.trainer.lifecycle.ledger import Total
from unicrond.agents.trainer.lifecycle.member_state import (
    MemberState,
    PendingWork,
    begin_iteration,
    leave_broken_group,
    report_commit,
    start_clock,
)
from unicrond.agents.trainer.lifecycle.optimizer_state import gather, leave_parts
from unicrond.agents.trainer.lifecycle.regrouping import regroup, transfer
from unicrond.agents.trainer.lifecycle.results import GroupBroken, MembershipSuperseded
from unicrond.agents.trainer.lifecycle.saving import save


def gather_parameters(member: MemberState) -> Flow[bool]:
    """Have all parameters that other replicas have stepped. Return False where the live state was lost meanwhile:
    another iteration begins instead."""
    member.has_trained = True
    shares = member.shares
    if shares is None:
        return True
    member.has_stepped = True
    yield from FaultPoint("stepped", member.ledger.iteration, member.ledger.finished)
    while True:
        member.enter("gathering")
        failure = ""
        try:
            yield from gather(shares)
            member.has_stepped = False
            return True
        except GroupBroken as broken:
            failure = str(broken)
        except MembershipSuperseded:
            pass
        if failure:
            yield from leave_broken_group(member, failure, "step")
        if not (yield from regroup(member)):
            return False


def commit(member: MemberState) -> Flow[None]:
    """Commit the step, which is made on all replicas: report, save, and go to the next iteration's group."""
    member.enter("committing")
    membership, total, iteration = member.membership, member.total, member.ledger.iteration
    assert membership is not None and total is not None
    duration_us = yield from _record_commit(member, total)
    yield from Observe(iteration, total, duration_us, membership)
    pending_work, member.pending_work = member.pending_work, None
    yield from begin_iteration(member, iteration + 1)
    yield from start_clock(member)
    yield from FaultPoint("committed", member.ledger.iteration)
    target = (yield from GetMembership(member.target)) if member.target else None
    failure = ""
    try:
        yield from save(member, iteration, duration_us)
        if (yield from _prepare_next(member, membership, pending_work, target)):
            return
    except GroupBroken as broken:
        failure, target = str(broken), None
    except MembershipSuperseded:
        target = None
    if failure:
        yield from leave_broken_group(member, failure, "regroup")
    yield from regroup(member, target)


def _record_commit(member: MemberState, total: Total) -> Flow[int]:
    """Record and report the commit of the iteration; return its duration in microseconds."""
    now_s = member.clock()
    duration_us = int((now_s - member.boundary_s) * 1e6)
    member.loss = total.loss
    member.last_commit = IterationCommitted(
        generation=total.generation,
        iteration=member.ledger.iteration,
        samples=total.samples,
        samples_digest=total.samples_digest,
        loss=total.loss,
        duration_us=duration_us,
        micro_batches_by_rank=total.micro_batches_by_rank,
        micro_batches_repeated=total.repeated,
    )
    member.commit_reported = False
    member.boundary_s = now_s
    member.total = None
    yield from report_commit(member)
    return duration_us


def _prepare_next(
    member: MemberState, present: GroupMembership, pending_work: PendingWork | None, target: GroupMembership | None
) -> Flow[bool]:
    """Prepare the next iteration in this group, with what the last verdict left to do. Return False where it is to
    happen in the target's. Throws GroupBroken, MembershipSuperseded."""
    verdict = pending_work.verdict if pending_work is not None and pending_work.assigns_next else None
    if pending_work is not None and pending_work.transfer_pending:
        member.assign(pending_work.verdict)
        yield from transfer(member, pending_work)
        return True
    if target is None:
        member.assign(verdict)
        yield from PrepareStandby(present)
        return True
    if member.shares is not None:
        yield from leave_parts(member, member.shares, present, target)
    return False
