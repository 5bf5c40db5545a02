"""Follows memberships, the newest first, until a group has exchanged positions.

Rules
-----
* While the group is sound, an *urgent* membership is followed at once, a planned one at the boundary of an iteration
  whose agreement showed that all members hold it (the target).
* Without a sound group (none yet, a broken one, one that would not form), any membership newer than the one
  last tried is followed. Older ones never.
* A broken group is left before anything else. A sound one is kept until the next has formed: its peers may still be
  reading the end of the last agreement from it.
"""

from __future__ import annotations

from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.trainer.lifecycle import verdict
from unicrond.agents.trainer.lifecycle.effects import (
    AnyShard,
    AwaitMembership,
    DropOldGroup,
    ExchangePositions,
    FaultPoint,
    Flow,
    FollowMembership,
    FormGroup,
    KeepOldGroup,
    LeaveGroup,
    ReportFailure,
    ReportHoldings,
)
from unicrond.agents.trainer.lifecycle.member_state import MemberState
from unicrond.agents.trainer.lifecycle.optimizer_shards import covers
from unicrond.agents.trainer.lifecycle.results import (
    GroupBroken,
    MembershipSuperseded,
    QuitRequested,
    RendezvousTimedOut,
)
from unicrond.agents.trainer.lifecycle.verdict import GroupVerdict, Position


class NotAMember(Exception):
    """The membership to follow does not name this worker."""

    def __init__(self, membership: GroupMembership) -> None:
        super().__init__(f"generation {membership.generation} does not name this worker")
        self.membership = membership


def join(member: MemberState, target: GroupMembership | None) -> Flow[tuple[GroupMembership, GroupVerdict]]:
    """Follow the membership, and any newer one that comes meanwhile, until a group has drawn a verdict.

    `target`: leave a sound group for it. None: wait for one. Raises NotAMember (the old group stays open),
    RendezvousTimedOut.
    """
    position = member.position((yield from ReportHoldings()))
    yield from KeepOldGroup(is_sound=target is not None, bounded=position.has_state)
    try:
        while True:
            membership = target or (yield from AwaitMembership())
            target = None
            member.generation = membership.generation
            yield from FollowMembership(membership)
            if all(peer.worker != member.worker for peer in membership.members):
                raise NotAMember(membership)
            failure = ""
            try:
                verdict = yield from _attempt(member, membership, position)
                break
            except GroupBroken as broken:
                failure = str(broken)
            except MembershipSuperseded:
                pass
            if failure:
                yield from ReportFailure(failure, position.iteration, "regroup")
            yield from LeaveGroup()
            yield from DropOldGroup()
    except (RendezvousTimedOut, QuitRequested):
        yield from DropOldGroup()
        raise
    return membership, verdict


def _attempt(member: MemberState, membership: GroupMembership, position: Position) -> Flow[GroupVerdict]:
    yield from FaultPoint("forming", position.iteration)
    yield from FormGroup(membership)
    yield from FaultPoint("formed", position.iteration)
    shares = member.shares
    positions = yield from ExchangePositions(position, shares is not None)
    is_whole_everywhere = True
    if shares is not None:
        late = verdict.find_left_behind(positions, lanes=member.lanes is not None)
        able_positions = [
            peer_position
            for rank, peer_position in enumerate(positions)
            if peer_position.has_state and rank not in late
        ]
        is_whole = covers((peer_position.spans for peer_position in able_positions), shares.total)
        is_whole_everywhere = not (yield from AnyShard(not is_whole))  # what one shard has lost counts as lost on all
    group_verdict = verdict.judge(
        positions, member.micro_batches, whole=is_whole_everywhere, lanes=member.lanes, fill=member.dealing.fill
    )
    yield from FaultPoint("exchanged", position.iteration)
    return group_verdict
