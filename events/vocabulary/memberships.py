"""Memberships: the workers that train a task, and the nodes that hold copies of its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from unicrond.events.vocabulary.base import BroadcastDecision, Observation, Value
from unicrond.events.vocabulary.field_types import (
    Count,
    FirstSerial,
    Iteration,
    Micros,
    Name,
    NodeNames,
    Serial,
    Size,
    Slots,
    Small,
    SomeWorkers,
    Text,
    WorkerId,
    Workers,
)
from unicrond.events.vocabulary.nodes import MemoryService, StoreAddress
from unicrond.events.vocabulary.phrases import count
from unicrond.events.vocabulary.plans import NodeRun


class SeatRun(Value, frozen=True, kw_only=True, array_like=True):
    """A run of `count` members of a task on one node, with consecutive numbers at consecutive seats
    (events/vocabulary/placements.py).

    `number`, `seat`: of the first one. `joins`: they are joiners. On the wire a bare array: it gets no further field.
    """

    node: Name
    number: Serial
    seat: Count
    count: Slots
    joins: bool


def workers_in(runs: Iterable[SeatRun | NodeRun]) -> int:
    """Count the workers that the runs hold."""
    return sum([seat_run.count for seat_run in runs])


class Member(Value, frozen=True, kw_only=True):
    """A worker's place in a membership: shard `shard` of data-parallel replica `replica`."""

    worker: WorkerId
    node: Name
    replica: Serial
    shard: Workers


class MembershipDecided(BroadcastDecision, frozen=True, kw_only=True):
    """The task is trained by these workers from now on. The nodes read it here.

    `urgent`: a member is gone; leave the broken group at once. Not urgent: switch at the next iteration boundary that
    all members agree on in band; a worker that is no longer a member parks there. Where no member stays, the lead
    writes a checkpoint before it parks.

    `seats`: the last of the members' runs; `parts` MembershipParts before the decision hold the runs before them.
    Joiners have no state; they take it from the other members, or from the nearest checkpoint. `size`: of a replica.
    `peers`: nodes that hold the task's state in memory, or are to: copies go to the first that is not the node itself.
    `mtbf_us`: expected time to the task's next failure, 0 = not known. `handover`: workers of another layout are about
    to take the state from the nodes' memory, so that the lead need not write it to storage. `stop`: why training is to
    end at the next boundary (hook.stop); "": it is not.

    `leader_confirms`: the first member's WorkerJoinedGroup says that all have met. Agents report no other member that
    keeps its state: of a large group that is one event instead of one per member. Joiners are reported as ever.

    `takes_stacks`: the group before hangs. Agents read their workers' stacks before these leave it (StacksTaken).

    `storage_iteration`: the newest checkpoint that is known of the task, 0 = there is none, None = not known. A state
    in memory that is older is not loaded before storage has been seen.
    """

    is_noteworthy: ClassVar[bool] = True

    generation: FirstSerial
    size: SomeWorkers
    seats: tuple[SeatRun, ...]
    parts: Small = 0
    urgent: bool
    store: StoreAddress
    incident: Text
    reason: Text
    peers: tuple[MemoryService, ...] = ()
    mtbf_us: Micros = 0
    handover: bool = False
    stop: Text = ""
    leader_confirms: bool = False
    takes_stacks: bool = False
    storage_iteration: Iteration | None = None

    def sentence(self) -> str:
        """Say it in one sentence."""
        members, joining = workers_in(self.seats), workers_in(seat_run for seat_run in self.seats if seat_run.joins)
        joiners = f", {joining} joining" if joining else ""
        parts = f" and those of {count(self.parts, 'part')}" if self.parts else ""
        urgent = "at once" if self.urgent else "at the next iteration"
        return (
            f"task {self.task} generation {self.generation}: {count(members, 'member')}{joiners}{parts},"
            f" {urgent}; {self.reason}"
        )

    def nodes_named(self) -> Iterator[str]:
        """Yield the nodes that it names."""
        for seat_run in self.seats:
            yield seat_run.node


class MembershipPart(BroadcastDecision, frozen=True, kw_only=True):
    """The part `part`, counted from 1, of a membership that is too large for one event.

    It means nothing before the MembershipDecided of the same term and generation that counts it in
    (events/vocabulary/placements.py).
    """

    generation: FirstSerial
    part: Size
    seats: tuple[SeatRun, ...]

    def sentence(self) -> str:
        """Say it in one sentence."""
        members = count(workers_in(self.seats), "member")
        return f"task {self.task} generation {self.generation}: {members} in part {self.part}"

    def nodes_named(self) -> Iterator[str]:
        """Yield the nodes that it names."""
        for seat_run in self.seats:
            yield seat_run.node


class PeersDecided(BroadcastDecision, frozen=True, kw_only=True):
    """Nodes have come or gone: from now on copies of the task's state go to the first of `peers`."""

    peers: tuple[MemoryService, ...]

    def sentence(self) -> str:
        """Say it in one sentence."""
        peers = ", ".join(peer.node for peer in self.peers) or "no node"
        return f"the state of task {self.task} is copied to {peers}"


class PeersRemembered(Observation, frozen=True, kw_only=True):
    """An agent that has adopted workers of the task reports to which nodes it copies the task's state.

    It goes by what its predecessor has written down: on a full disk that is not what it was sent last.
    """

    node: Name
    task: Name
    peers: NodeNames

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} knows {', '.join(self.peers) or 'no node'} as peers of task {self.task}"
