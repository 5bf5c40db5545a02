"""A model of how a group forms and of its collectives, in the place of agents/trainer/groups/group.py.

Rules
-----
* A member sets its key in the membership's store and waits for all keys; then it connects to all others.
* A collective completes for a member once all members have entered it, for each at a moment of its own. So a death can
  let it complete for some members and break for the rest: the all-or-none commit exists for this case.
* A leaving member closes its connections: its peers notice within milliseconds, one after the other. A member that
  loses its power or its network sends nothing: its peers wait, until a newer membership or the collective's timeout.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from unicrond.agents.protocol.messages import GroupMembership
from unicrond.replay.simulation.trainer.ports import GroupMember

Row: TypeAlias = Sequence[int]


class SimulatedGroup:
    """The group of one generation of one task, over its replicas."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random, membership: GroupMembership) -> None:
        self.loop = loop
        self.rng = rng
        self.membership = membership
        self.leads = [member.worker for member in membership.members if member.shard == 0]
        self.size = len(self.leads)
        self.keys: set[int] = set()
        self.present: dict[int, End] = {}
        self.collectives: list[GroupCollective] = []
        self.transfers: dict[tuple[int, ...], GroupCollective] = {}

    def enter(self, replica: GroupMember) -> End:
        """Set the replica's key, and return its end of the group."""
        end = End(self, self.leads.index(replica.lead_worker), replica)
        self.keys.add(end.rank)
        self.present[end.rank] = end
        for member in self.present.values():
            member.replica.wake()
        return end


class GroupCollective:
    """One collective of `size` members, or a transfer between two: the row of each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: dict[int, Row] = {}


class End:
    """A member's connection to a group."""

    def __init__(self, group: SimulatedGroup, rank: int, replica: GroupMember) -> None:
        self.group = group
        self.rank = rank
        self.replica = replica
        self.broken = ""
        #: By member to whom connections have ended: the replica's shards that had them.
        self.lost_shards: dict[int, set[int]] = {}
        self._entered = 0
        self._pending: list[Result] = []

    @property
    def all_keys(self) -> bool:
        """Check that every member has set its key."""
        return len(self.group.keys) == self.group.size

    def connects(self) -> bool:
        """Return whether all members are present and can be reached."""
        group = self.group
        return len(group.present) == group.size and all(
            self.replica.reaches(member.replica) for member in group.present.values()
        )

    def gather(self, row: Row, timeout_s: float) -> Result:
        """Enter the next collective with this member's row."""
        group, number = self.group, self._entered
        self._entered += 1
        while len(group.collectives) <= number:
            group.collectives.append(GroupCollective(group.size))
        return self._enter(group.collectives[number], row, timeout_s)

    def send_row(self, tag: tuple[int, ...], row: Row, timeout_s: float) -> Result:
        """Send a row to another member, which receives it under the same tag with an empty row of its own."""
        return self._enter(self.group.transfers.setdefault(tag, GroupCollective(2)), row, timeout_s)

    def _enter(self, collective: GroupCollective, row: Row, timeout_s: float) -> Result:
        group = self.group
        collective.rows[self.rank] = tuple(row)
        result = Result(self, collective)
        self._pending.append(result)
        if collective.size == 1:
            result.rows = [tuple(row)]
            self._pending.remove(result)
            return result
        group.loop.call_later(timeout_s, result.fail, "timed out")
        if self.broken:
            group.loop.call_later(0.002, result.fail, self.broken)
        if result.complete:
            for member in group.present.values():
                for pending in member._pending:
                    if pending.collective is collective:
                        pending.deliver()
        return result

    def leave(self, *, silently: bool = False) -> None:
        """Close the connections. `silently`: without notice to the peers (the power or the network has failed)."""
        group = self.group
        under_way, self._pending = self._pending, []
        for result in under_way:
            result.fail("left")
        if group.present.pop(self.rank, None) is not None and not silently:
            for member in group.present.values():
                group.loop.call_later(group.rng.uniform(0.001, 0.02), member.peer_left, self.rank)

    def peer_left(self, rank: int, shards: Iterable[int] | None = None) -> None:
        """Handle that connections of this member's shards (None: of all) ended: pending collectives break, unless all
        have entered and chance lets them finish."""
        self.broken = f"connection closed by member {rank}"
        self.lost_shards.setdefault(rank, set()).update(range(len(self.replica.shards)) if shards is None else shards)
        for pending in list(self._pending):
            if not (pending.complete and self.group.rng.random() < 0.5):
                pending.fail(self.broken)

    def release(self, result: Result) -> None:
        """Stop waiting for the result, and wake the replica."""
        if result in self._pending:
            self._pending.remove(result)
        self.replica.wake()


class Result:
    """The result of a collective that a member waits for."""

    def __init__(self, end: End, collective: GroupCollective) -> None:
        self.end = end
        self.collective = collective
        self.rows: list[Row] | None = None
        self.error = ""

    @property
    def is_settled(self) -> bool:
        """Check that it has arrived or failed."""
        return self.rows is not None or bool(self.error)

    @property
    def complete(self) -> bool:
        """Check that all members have entered."""
        return len(self.collective.rows) == self.collective.size

    def deliver(self) -> None:
        """Send the result to this member, now that all have entered."""
        group = self.end.group
        group.loop.call_later(group.rng.uniform(0.001, 0.02), self._arrive)

    def _arrive(self) -> None:
        end = self.end
        if self.is_settled:
            return
        peers = (peer.replica for rank, peer in end.group.present.items() if rank in self.collective.rows)
        if not all(end.replica.reaches(peer) for peer in peers):
            end.group.loop.call_later(0.3, self._arrive)  # lost packets are sent again
            return
        self.rows = [row for _, row in sorted(self.collective.rows.items())]
        end.release(self)

    def fail(self, reason: str) -> None:
        """Mark the result as failed: it will not arrive any more."""
        if not self.is_settled:
            self.error = reason
            self.end.broken = self.end.broken or reason
            self.end.release(self)
