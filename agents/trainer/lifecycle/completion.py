"""The end of training: saves the last state, reports that the task is complete, and has all members leave together.

After the last iteration no member leaves before the leader has saved: if the leader dies, another member saves.
"""

from __future__ import annotations

from unicrond.agents.trainer.lifecycle.boundary import commit, gather_parameters
from unicrond.agents.trainer.lifecycle.effects import (
    AwaitUrgent,
    BeginFinalSave,
    Flow,
    Flush,
    GatherRows,
    LeaveGroup,
    ParamsDigest,
    Send,
    SetPhase,
)
from unicrond.agents.trainer.lifecycle.member_state import MemberState, leave_broken_group
from unicrond.agents.trainer.lifecycle.optimizer_state import assemble
from unicrond.agents.trainer.lifecycle.regrouping import regroup
from unicrond.agents.trainer.lifecycle.results import GroupBroken, MembershipSuperseded
from unicrond.agents.trainer.lifecycle.saving import save_and_wait
from unicrond.events.vocabulary import StopRequested, TaskCompleted

_FLUSH_S = 2.0
_COMPLETED_FLUSH_S = 5.0
#: How long the others may take to leave as well, before they are left: this, or two iterations.
_PARTING_S = 5.0


def complete(member: MemberState) -> Flow[bool]:
    """Have the leader save and report that the task is complete; leave together. Return False where the live state was
    lost before that, and iterations are left."""
    is_reported = False
    stores = bool(member.launch.spec.checkpoint.dir)
    while True:
        member.enter("ending")
        yield from BeginFinalSave(member.ledger.iteration, member.in_leader_replica and stores)
        failure = ""
        try:
            if member.shares is not None and (stores or member.saves is not None):
                yield from assemble(member, member.shares)
            if member.in_leader_replica and not is_reported:
                yield from save_and_wait(member)
                is_reported = True
                if member.is_leader:
                    yield from _report_completed(member)
            yield from GatherRows([member.ledger.iteration])
            return True
        except GroupBroken as broken:
            failure = str(broken)
        except MembershipSuperseded:
            pass
        if failure:
            yield from leave_broken_group(member, failure, "checkpoint")
        else:
            yield from LeaveGroup()
        yield from regroup(member)
        if member.is_training:
            return False


def _report_completed(member: MemberState) -> Flow[None]:
    digest = yield from ParamsDigest()
    yield from Send(
        TaskCompleted(**member.launch.reporter, iteration=member.last_iteration, loss=member.loss, params_digest=digest)
    )
    yield from Flush(_COMPLETED_FLUSH_S)


def leave_after_stop(member: MemberState) -> Flow[None]:
    """Leave after the program has called `stop` and does not come back for the end of training: commit what it has
    stepped. If all have agreed on the end by then, they end together. Else the others wait for this one in the next
    iteration; where they all have left as well, the log knows, and asks all to end; where not, they go on without it
    and end after their next. (A part of sharded optimizer state is not saved alone: newer processes train on from the
    last that was.)"""
    if member.agreed and (yield from gather_parameters(member)):
        yield from commit(member)
    if member.stop_agreed and (yield from complete(member)):
        yield from SetPhase("done")
        return
    member.enter("ending")
    yield from BeginFinalSave(member.ledger.iteration, True)
    if member.shares is None:
        if member.in_leader_replica:
            yield from save_and_wait(member)
        yield from Send(
            StopRequested(
                **member.launch.reporter, iteration=member.last_iteration, reason=member.stop_reason, has_left_loop=True
            )
        )
        yield from AwaitUrgent(max(_PARTING_S, 2.0 * member.pace_s))
    yield from SetPhase("done")
    yield from Flush(_FLUSH_S)
    yield from LeaveGroup()
