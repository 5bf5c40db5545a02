"""Seats: the members of a task, and the nodes of a plan, as runs instead of one by one; and a membership in parts.

Rules
-----
* A seat is `replica * size + shard`, `size` being the workers of a replica: its place among all shards. Workers of one
  node with consecutive numbers at consecutive seats are one run, so a membership takes some 20 bytes a node, whatever
  the node's slots.
* A membership that is too large for one event is sent in parts: MembershipPart 1, 2, ..., and MembershipDecided last.
  Only that one commits: before it the parts mean nothing.
* Parts count if they come in order, without a gap, in one term and for one generation. Part 1 begins anew, whatever was
  there; so does another term. Anything else that does not fit ends what was begun.
* A MembershipDecided that counts in other parts than are there is *torn*, and inert: for the fold as for the nodes,
  which follow the same rule (`PartialMembership`). A coordinator that dies between parts leaves nothing behind; the
  next one decides anew.

What does not live here: when a membership is decided (unicrond/core/deciding/), how nodes receive it (event_log.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache

import msgspec

from unicrond.events.vocabulary import (
    SERIAL_MAX,
    WORKERS_MAX,
    Member,
    MembershipDecided,
    MembershipPart,
    Name,
    NodeRun,
    SeatRun,
    StartWorker,
    StartWorkers,
    TaskAssignment,
    workers_in,
)

#: A run's `count` is at most this (vocabulary.Slots).
RUN_MAX = 1024


# --- memberships -----------------------------------------------------------------------------------


def runs_of(members: Sequence[Member], joiners: Collection[str], size: int) -> tuple[SeatRun, ...]:
    """Return the members of one task, in their order, as runs. `size`: workers of a replica, >= 1."""
    runs: list[SeatRun] = []
    serial = members[0].worker.rindex(".") + 1 if members else 0
    node, number, seat, joins, count = "", 0, 0, False, 0
    for member in members:
        worker = member.worker
        worker_number, worker_seat, worker_joins = (
            int(worker[serial:]),
            member.replica * size + member.shard,
            worker in joiners,
        )
        if (
            worker_number == number + count and worker_seat == seat + count
            and member.node == node and worker_joins == joins and 0 < count < RUN_MAX
        ):  # fmt: skip
            count += 1
            continue
        if count:
            runs.append(SeatRun(node=node, number=number, seat=seat, count=count, joins=joins))
        node, number, seat, joins, count = member.node, worker_number, worker_seat, worker_joins, 1
    if count:
        runs.append(SeatRun(node=node, number=number, seat=seat, count=count, joins=joins))
    return tuple(runs)


def members_of(task: str, runs: Iterable[SeatRun], size: int) -> tuple[Member, ...]:
    """Expand runs into members: the inverse of `runs_of`. `size`: workers of a replica, >= 1."""
    members: list[Member] = []
    for seat_run in runs:
        members += _seated(task, seat_run.node, seat_run.number, seat_run.seat, seat_run.count, size)
    return tuple(members)


@lru_cache(maxsize=16_384)  # from one membership to the next nearly all runs stay
def _seated(task: str, node: str, number: int, seat: int, count: int, size: int) -> tuple[Member, ...]:
    return tuple(
        [
            Member(worker=f"{task}.{number + i}", node=node, replica=(seat + i) // size, shard=(seat + i) % size)
            for i in range(count)
        ]
    )


def joiners_of(task: str, runs: Iterable[SeatRun]) -> tuple[str, ...]:
    """Return the joiners that `runs_of` was given, in the members' order."""
    return tuple(
        [f"{task}.{seat_run.number + i}" for seat_run in runs if seat_run.joins for i in range(seat_run.count)]
    )


def cut(runs: Sequence[SeatRun], part_bytes: int) -> list[tuple[SeatRun, ...]]:
    """Split the runs into parts of at most `part_bytes` (or of one run); at least one part."""
    parts: list[tuple[SeatRun, ...]] = []
    part: list[SeatRun] = []
    size_bytes = 0
    for seat_run in runs:
        run_bytes = len(msgspec.msgpack.encode(seat_run))
        if part and size_bytes + run_bytes > part_bytes:
            parts.append(tuple(part))
            part, size_bytes = [], 0
        part.append(seat_run)
        size_bytes += run_bytes
    return [*parts, tuple(part)]


class PartialMembership(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a membership that have come so far."""

    term: int
    generation: int
    parts: int
    seats: tuple[SeatRun, ...]


def add_part(telling: PartialMembership | None, part: MembershipPart, term: int) -> PartialMembership | None:
    """Add `part`, of `term`, to the parts so far; return None where it does not follow them."""
    if part.part == 1:
        base = PartialMembership(term=term, generation=part.generation, parts=0, seats=())
    elif telling is None or (telling.term, telling.generation, telling.parts + 1) != (term, part.generation, part.part):
        return None
    else:
        base = telling
    seats = base.seats + part.seats
    if workers_in(seats) > WORKERS_MAX:
        return None
    return PartialMembership(term=term, generation=part.generation, parts=part.part, seats=seats)


def broadcast_seats(
    telling: PartialMembership | None, decided: MembershipDecided, term: int
) -> tuple[SeatRun, ...] | None:
    """Return all seats of the membership that `decided`, of `term`, completes after the parts so far.

    None: it is torn, or holds impossible numbers.
    """
    seats, size = decided.seats, decided.size
    if decided.parts:
        received = (telling.term, telling.generation, telling.parts) if telling else None
        if telling is None or received != (term, decided.generation, decided.parts):
            return None
        seats = telling.seats + seats
    fits = workers_in(seats) <= WORKERS_MAX and all(
        seat_run.number + seat_run.count - 1 <= SERIAL_MAX
        and (seat_run.seat + seat_run.count - 1) // size <= SERIAL_MAX
        for seat_run in seats
    )
    return seats if fits else None


# --- plans -----------------------------------------------------------------------------------------


def compact(assignment: TaskAssignment, size: int) -> TaskAssignment:
    """Convert the assignment to runs of nodes instead of `replicas`. `size`: workers of a replica, >= 1."""
    runs: list[NodeRun] = []
    node, count = "", 0
    for name in (name for replica in assignment.replicas for name in replica):
        if name == node and count < RUN_MAX:
            count += 1
            continue
        if count:
            runs.append(NodeRun(node=node, count=count))
        node, count = name, 1
    if count:
        runs.append(NodeRun(node=node, count=count))
    return msgspec.structs.replace(assignment, replicas=(), nodes=tuple(runs), replica_workers=size)


def expand(assignment: TaskAssignment) -> TaskAssignment:
    """Return the assignment with the nodes of each replica; unchanged where it has them."""
    size = assignment.replica_workers
    if not size:
        return assignment
    names: list[Name] = []
    for seat_run in assignment.nodes:
        names += [seat_run.node] * seat_run.count
    replicas = tuple([tuple(names[first : first + size]) for first in range(0, len(names), size)])
    return msgspec.structs.replace(assignment, replicas=replicas, nodes=(), replica_workers=0)


# --- starts ----------------------------------------------------------------------------------------


def starts(command: StartWorkers) -> Iterator[StartWorker]:
    """Yield the commands to start one worker each that `command` stands for.

    They are answered one by one, under its id and their index: "1.2.node.3/0", "1.2.node.3/1", ...
    """
    for place, start in enumerate(command.starts):
        yield StartWorker(
            command_id=f"{command.command_id}/{place}",
            node=command.node,
            epoch=command.epoch,
            agent_boot=command.agent_boot,
            spec=command.spec,
            worker=f"{command.spec.name}.{start.number}",
            replica=start.replica,
            shard=start.shard,
            store=start.store,
        )


def starts_of(command_id: str, worker_command_id: str) -> bool:
    """Say whether the worker was started by the command, alone or among others."""
    before, slash, _ = worker_command_id.rpartition("/")
    return worker_command_id == command_id or (before == command_id and bool(slash))
