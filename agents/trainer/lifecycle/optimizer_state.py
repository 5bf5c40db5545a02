"""Moves sharded optimizer state: gathers parameters after each step, divides the parts in each group, assembles all to
save it.

Rules
-----
* A group that breaks while parameters are gathered has harmed nothing: what has arrived is what would have arrived, and
  the next group gathers again, from the members that hold the parts then.
* Parts are staged, all say that they have staged theirs, and only then (`Adopt`) is dropped what was held before: a
  member that has heard from all knows that all have theirs, and one that has not still has both. No step happens in
  between.
"""

from __future__ import annotations

from collections.abc import Sequence

from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.trainer.lifecycle.effects import (
    Adopt,
    Assemble,
    FaultPoint,
    Flow,
    GatherParameters,
    GatherRows,
    Log,
    Stage,
    StageFirst,
)
from unicrond.agents.trainer.lifecycle.member_state import MemberState
from unicrond.agents.trainer.lifecycle.optimizer_shards import StatePart
from unicrond.agents.trainer.lifecycle.shares import Shares, assign_parts, nodes_of


def gather(shares: Shares) -> Flow[None]:
    """Have all members get all parameters that any of them has stepped. Throws GroupBroken, MembershipSuperseded."""
    yield from GatherParameters(shares.gathering())


def divide(
    member: MemberState, shares: Shares, new_parts: Sequence[Sequence[StatePart]], *, first: bool = False
) -> Flow[None]:
    """Have each member hold its parts, `new_parts[rank]`, and nothing else. `first`: training begins, nothing is held
    yet. Throws GroupBroken, MembershipSuperseded."""
    started_s, parts, received_bytes = member.clock(), new_parts[member.rank], 0
    if first:
        yield from StageFirst(parts)
    else:
        received_bytes = yield from Stage(parts, shares.dividing(new_parts))
    yield from FaultPoint("dividing", member.ledger.iteration, member.ledger.finished)
    yield from GatherRows([1])
    yield from Adopt()
    shares.layout = shares.layout_of(new_parts)
    indices = ", ".join(f"{part.index + 1} of {part.count}" for part in parts) or "none"
    details = f"{received_bytes} bytes of them from other replicas, {(member.clock() - started_s) * 1e3:.0f} ms"
    yield from Log(f"holds parts {indices}; {details}")


def assemble(member: MemberState, shares: Shares, *, at_boundary: bool = False) -> Flow[None]:
    """Have the leader's replica hold the whole state, to be saved; all take part. Throws GroupBroken,
    MembershipSuperseded."""
    yield from Assemble(shares.assembling(), at_boundary)
    member.has_whole_state = member.rank == 0


def leave_parts(member: MemberState, shares: Shares, present: GroupMembership, target: GroupMembership) -> Flow[None]:
    """Leave no part without a holder before a planned membership: have those that stay hold every part, or, if none
    stays, the leader hold everything, to be saved. Throws GroupBroken, MembershipSuperseded."""
    target_workers = {peer.worker for peer in target.members}
    staying = [rank for rank, peer in enumerate(member.peers) if peer.worker in target_workers]
    if not staying:
        yield from assemble(member, shares)
    elif not shares.are_whole([shares.layout[rank] for rank in staying]):
        yield from divide(member, shares, assign_parts(nodes_of(present), staying))
