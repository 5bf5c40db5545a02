"""A group's forming and its collectives, as agents/trainer/groups/group.py meets them.

Rules
-----
* A member sets its key in the membership's store and waits for all keys; then it connects to all others.
* A collective completes for a member once all members have entered it, for each at a moment of its own. So a death can
  let it complete for some and break for others: the case that the all-or-none commit is there for.
* A leaving member closes its connections: the others notice within milliseconds, one after the other. One that loses
  its power or its network says nothing: they wait, until a newer membership or the collective's timeout ends it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from agents.protocol.messages import Membership

if TYPE_CHECKING:
    from replay.simulation.replica import Replica

Row: TypeAlias = Sequence[int]


class Group:
    """The group of one generation of one task, over its replicas."""

    def __init__(self, loop: asyncio.AbstractEventLoop, drawn: random.Random, membership: Membership) -> None:
        self.loop = loop
        self.drawn = drawn
        self.membership = membership
        self.leads = [member.worker for member in membership.members if member.shard == 0]
        self.size = len(self.leads)
        self.keys: set[int] = set()
        self.present: dict[int, End] = {}
        self.meetings: list[Meeting] = []
        self.passed: dict[tuple[int, ...], Meeting] = {}

    def enter(self, replica: Replica) -> End:
        """The replica sets its key."""
        end = End(self, self.leads.index(replica.lead_worker), replica)
        self.keys.add(end.rank)
        self.present[end.rank] = end
        for other in self.present.values():
            other.replica.wake()
        return end


class Meeting:
    """One collective of `size` members, or two: what each put in."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: dict[int, Row] = {}


class End:
    """A member's end of a group."""

    def __init__(self, group: Group, rank: int, replica: Replica) -> None:
        self.group = group
        self.rank = rank
        self.replica = replica
        self.broken = ""
        #: The members to whom connections have ended: of which of the replica's shards.
        self.lost: dict[int, set[int]] = {}
        self._entered = 0
        self._under_way: list[Result] = []

    @property
    def all_keys(self) -> bool:
        """Everybody has set its key."""
        return len(self.group.keys) == self.group.size

    def connects(self) -> bool:
        """All members are there and can be reached."""
        group = self.group
        return len(group.present) == group.size and all(
            self.replica.reaches(other.replica) for other in group.present.values()
        )

    def gather(self, row: Row, timeout_s: float) -> Result:
        """Enter the next collective with one's row."""
        group, number = self.group, self._entered
        self._entered += 1
        while len(group.meetings) <= number:
            group.meetings.append(Meeting(group.size))
        return self._enter(group.meetings[number], row, timeout_s)

    def passing(self, tag: tuple[int, ...], row: Row, timeout_s: float) -> Result:
        """Give another member a row, which takes it by the same tag; that one puts in none."""
        return self._enter(self.group.passed.setdefault(tag, Meeting(2)), row, timeout_s)

    def _enter(self, meeting: Meeting, row: Row, timeout_s: float) -> Result:
        group = self.group
        meeting.rows[self.rank] = tuple(row)
        result = Result(self, meeting)
        self._under_way.append(result)
        if meeting.size == 1:
            result.rows = [tuple(row)]
            self._under_way.remove(result)
            return result
        group.loop.call_later(timeout_s, result.fail, "timed out")
        if self.broken:
            group.loop.call_later(0.002, result.fail, self.broken)
        if result.complete:
            for member in group.present.values():
                for waiting in member._under_way:
                    if waiting.meeting is meeting:
                        waiting.come()
        return result

    def leave(self, *, silently: bool = False) -> None:
        """Close the connections. `silently`: without a word to the peers (the power or the network is gone)."""
        group = self.group
        under_way, self._under_way = self._under_way, []
        for result in under_way:
            result.fail("left")
        if group.present.pop(self.rank, None) is not None and not silently:
            for other in group.present.values():
                group.loop.call_later(group.drawn.uniform(0.001, 0.02), other.peer_left, self.rank)

    def peer_left(self, rank: int, shards: Iterable[int] | None = None) -> None:
        """Connections of this member's shards (None: of all) ended: what is under way breaks, unless it was as good as
        done."""
        self.broken = f"connection closed by member {rank}"
        self.lost.setdefault(rank, set()).update(range(len(self.replica.shards)) if shards is None else shards)
        for waiting in list(self._under_way):
            if not (waiting.complete and self.group.drawn.random() < 0.5):
                waiting.fail(self.broken)

    def over(self, result: Result) -> None:
        """It is waited for no longer."""
        if result in self._under_way:
            self._under_way.remove(result)
        self.replica.wake()


class Result:
    """What a member waits for."""

    def __init__(self, end: End, meeting: Meeting) -> None:
        self.end = end
        self.meeting = meeting
        self.rows: list[Row] | None = None
        self.error = ""

    @property
    def over(self) -> bool:
        """It has come, or failed."""
        return self.rows is not None or bool(self.error)

    @property
    def complete(self) -> bool:
        """All members have entered."""
        return len(self.meeting.rows) == self.meeting.size

    def come(self) -> None:
        """All have entered: the result is on its way to this member."""
        group = self.end.group
        group.loop.call_later(group.drawn.uniform(0.001, 0.02), self._arrive)

    def _arrive(self) -> None:
        end = self.end
        if self.over:
            return
        others = (other.replica for rank, other in end.group.present.items() if rank in self.meeting.rows)
        if not all(end.replica.reaches(other) for other in others):
            end.group.loop.call_later(0.3, self._arrive)  # what was lost on the way is sent again
            return
        self.rows = [row for _, row in sorted(self.meeting.rows.items())]
        end.over(self)

    def fail(self, why: str) -> None:
        """It will not come any more."""
        if not self.over:
            self.error = why
            self.end.broken = self.end.broken or why
            self.end.over(self)
