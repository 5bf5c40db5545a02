"""One iteration: computes its micro-batches, reduces gradients and accounts, and has all members agree on the
result.

Where the agreement shows that one replica's parameters are not the majority's, the iteration begins again in the next
group: what that replica has computed stands in all sums. If it is still a member, it receives the state anew."""

from __future__ import annotations

from unicrond.agents.trainer.lifecycle.effects import (
    Agree,
    AgreeInReplica,
    AskSaveSchedule,
    Compute,
    FaultPoint,
    Flow,
    LastStage,
    Log,
    PendingGeneration,
    Reduce,
    SetPhase,
    Settle,
)
from unicrond.agents.trainer.lifecycle.ledger import Total
from unicrond.agents.trainer.lifecycle.member_state import MemberState, discard_iteration, leave_broken_group
from unicrond.agents.trainer.lifecycle.regrouping import regroup
from unicrond.agents.trainer.lifecycle.results import (
    NO_SAVE,
    GroupBroken,
    MembershipSuperseded,
    ReplicaDiffers,
    ReplicaWord,
    SaveSchedule,
)

#: In the agreement that ends an iteration a replica's word stands beside the word of what is saved.
_SCHEDULE_BITS = 2


def iterate(member: MemberState) -> Flow[float]:
    """Compute and reduce until all have agreed, in whichever group; return the mean loss per token."""
    member.agreed = False
    yield from SetPhase("forward")
    while not member.agreed:
        member.enter("computing")
        broken: GroupBroken | None = None
        try:
            yield from Compute(member.ledger)
            yield from _reduce(member)
            member.agreed = True
            continue
        except GroupBroken as failure:
            broken = failure
        except MembershipSuperseded:
            pass
        if isinstance(broken, ReplicaDiffers):
            yield from discard_iteration(member, keeps_state=not broken.is_own)
        if broken is not None:
            yield from leave_broken_group(member, str(broken), "reduce")
        member.agreed = yield from regroup(member)
    total = member.total
    assert total is not None
    yield from Settle(total)
    yield from SetPhase("step")
    yield from FaultPoint("agreed", member.ledger.iteration, member.ledger.finished)
    return total.loss


def _reduce(member: MemberState) -> Flow[None]:
    """Bring this iteration from *computed* to *agreed*. Throws GroupBroken, MembershipSuperseded."""
    member.enter("reducing")
    yield from SetPhase("reduce")
    ledger, membership = member.ledger, member.membership
    assert membership is not None
    yield from FaultPoint("computed", ledger.iteration, ledger.finished)
    ledger.loss_sum, ledger.tokens = yield from LastStage(*ledger.sums())
    if member.total is None:
        accounts = yield from Reduce(ledger)
        total = Total(membership.generation, tuple(accounts))
        total.check(ledger.iteration, member.micro_batches)
        member.total = total
    yield from FaultPoint("reduced", ledger.iteration, ledger.finished)
    yield from _agree(member)


def _agree(member: MemberState) -> Flow[None]:
    """Agree that all have complete sums; on the membership that comes next, on what is saved, on how micro-batches are
    dealt, and whether training ends."""
    member.enter("agreeing")
    ledger, membership = member.ledger, member.membership
    assert membership is not None
    pending = yield from PendingGeneration()
    word = yield from AgreeInReplica(bool(member.stop_reason), member.dealing.proposed_number)
    schedule = NO_SAVE
    if member.shares is not None:
        schedule = yield from AskSaveSchedule(ledger.iteration, membership, member.in_leader_replica)
    rows = yield from Agree([ledger.iteration, pending, schedule.word() + (word.word() << _SCHEDULE_BITS)])
    words = [ReplicaWord.of(row[2] >> _SCHEDULE_BITS) for row in rows]
    member.target = pending if {row[1] for row in rows} == {pending} else 0
    member.save_schedule = SaveSchedule.of(rows[0][2])
    if member.dealing.add(words) and member.is_leader:
        counts = ", ".join(map(str, member.dealing.deal.counts))
        yield from Log(f"from iteration {ledger.iteration + 1} on micro-batches are dealt by speed: {counts}")
    if any(peer_word.stop for peer_word in words):
        member.stop_reason = member.stop_reason or "another replica's program asked for it"
        member.stop_agreed, member.target = True, 0
