"""Which member of a group computes which micro-batch of an iteration: pure functions that every rank calls for itself.

Rules (both modes)
------------------
* Each micro-batch of an iteration is assigned exactly once. What a member has stays where it is, so that no finished
  work is computed twice; what no member has is assigned anew.
* It is assigned evenly: each next micro-batch counts for the member that has the fewest, the first in rank order among
  equals.

Rules (without lanes: the sum of a step follows the assignment)
---------------------------------------------------------------
* A member has what was assigned to it in this iteration, finished or not: the gradients stand, or will stand, in its
  accumulation.
* The others are assigned in ascending order. At an iteration's start that is round-robin; among survivors that have
  equally many it is round-robin over a lost member's micro-batches.

Rules (with lanes, the default: the sum of a step is fixed, `lanes.py`)
-----------------------------------------------------------------------
* A member has what stands in its sums. Where two have the same, the largest blocks count first, then the longest
  running sums.
* A *run* is consecutive micro-batches of one lane, computed by one member on top of the running sum before them. The
  runs of a lane make a *chain*: each member gives the running sum to the next, and keeps its own, in case that one is
  lost. A member's runs are ordered by their place in the chain, of equals first those that it gives away: so it waits
  for a sum only where it has nothing else left, and no members ever wait in a circle.
* While it waits it goes *ahead*: it computes the next micro-batches of that run, at most AHEAD of them, each apart, and
  adds them in their order when the sum is here. What has been computed ahead stands in no sum until then.
* Each member gets as many micro-batches as make the members even: of these first those that continue its own running
  sums, then a stretch of what is left, in the members' order. At an iteration's start each member gets one stretch, and
  where there are as many members as lanes and the lanes are of one length, each gets a lane.
* When all is computed, each lane's sum is at one member. It adds up what blocks it can (`ends`); the others are
  exchanged and added in the tree's order (`reduction.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from operator import itemgetter
from typing import TypeAlias

from unicrond.agents.trainer.lifecycle.lanes import Block, Lanes, Sums, blocks

#: Micro-batches that are computed ahead.
AHEAD = 2
#: Micro-batches by rank.
Batches: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive micro-batches of `lane`; none where a member only gives away what it has. `source`: the rank that
    sends the running sum before them, None: it is here, or 0. `target`: the rank that the running sum goes to
    afterwards."""

    lane: int
    micro_batches: tuple[int, ...]
    source: int | None = None
    target: int | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment with lanes, by rank. `valid`: the micro-batches in those of a member's sums that count. `runs`:
    what it computes, in this order. `ends`: the blocks whose sums it has when all is computed."""

    valid: tuple[frozenset[int], ...]
    runs: tuple[tuple[Run, ...], ...]
    ends: tuple[tuple[Block, ...], ...]

    def micro_batches(self, member: int) -> tuple[int, ...]:
        """Return the micro-batches that the member is to compute, in their order."""
        return tuple(micro_batch for run in self.runs[member] for micro_batch in run.micro_batches)


def assign(
    assignments: Sequence[Sequence[int]], in_sums: Sequence[Sequence[int]], micro_batches: int, lanes: Lanes | None
) -> tuple[Batches, Assignment | None]:
    """Return what each member is to compute on top of what it has, and with lanes the whole assignment.

    `assignments`, `in_sums`: by rank, what was assigned to each member and what stands in its sums. Raises ValueError.
    """
    if lanes is None:
        return assign_evenly(assignments, micro_batches), None
    assignment = assign_lanes(in_sums, lanes)
    return tuple(map(assignment.micro_batches, range(len(in_sums)))), assignment


def _receivers(counts: Sequence[int]) -> Iterator[int]:
    """Yield, without end, the member that gets the next micro-batch: the one with the fewest, the first of equals."""
    heap = [(count, member) for member, count in enumerate(counts)]
    heapify(heap)
    while True:
        count, member = heap[0]
        yield member
        heapreplace(heap, (count + 1, member))


def assign_evenly(assignments: Sequence[Sequence[int]], micro_batches: int) -> Batches:
    """Return the micro-batches newly assigned to each replica.

    `assignments[r]`: what replica `r` has, a subset of range(micro_batches), pairwise disjoint (ValueError if not).
    """
    if not assignments:
        raise ValueError("assignments: no replica to assign to")
    present = [micro_batch for batch in assignments for micro_batch in batch]
    if len(set(present)) != len(present):
        raise ValueError(f"assignments: {assignments} has a micro-batch twice")
    if any(not 0 <= micro_batch < micro_batches for micro_batch in present):
        raise ValueError(f"assignments: {assignments} has a micro-batch outside 0..{micro_batches - 1}")
    additions: list[list[int]] = [[] for _ in assignments]
    unassigned = sorted(set(range(micro_batches)).difference(present))
    for micro_batch, replica in zip(unassigned, _receivers([len(batch) for batch in assignments]), strict=False):
        additions[replica].append(micro_batch)
    return tuple(tuple(batch) for batch in additions)


@lru_cache(maxsize=8)
def initial_assignment(members: int, lanes: Lanes) -> Assignment:
    """Return the assignment of an iteration of which no member has anything."""
    return assign_lanes([()] * members, lanes)


def assign_lanes(in_sums: Sequence[Collection[int]], lanes: Lanes) -> Assignment:
    """Return the assignment for members whose sums have `in_sums[member]`: of each lane the first micro-batches. Raises
    ValueError without a member."""
    if not in_sums:
        raise ValueError("in_sums: no member to assign to")
    keeper = _keepers(in_sums, lanes)
    valid: list[set[int]] = [set() for _ in in_sums]
    for lane, (member, length) in keeper.items():
        valid[member].update(lanes.of(lane)[:length])
    counts = [len(batch) for batch in valid]
    needs = [0] * len(in_sums)
    for _, member in zip(range(lanes.micro_batches - sum(counts)), _receivers(counts), strict=False):
        needs[member] += 1
    runs: list[list[tuple[tuple[int, bool, int], Run]]] = [[] for _ in in_sums]
    final_lanes: list[set[int]] = [set() for _ in in_sums]
    for lane, chain in _chains(keeper, needs, lanes).items():
        final_lanes[chain[-1][0]].add(lane)
        for position, (member, batch) in enumerate(chain):
            source = chain[position - 1][0] if position else None
            target = chain[position + 1][0] if position + 1 < len(chain) else None
            if batch or target is not None:
                runs[member].append(((position, target is None, lane), Run(lane, batch, source, target)))
    return Assignment(
        valid=tuple(map(frozenset, valid)),
        runs=tuple(tuple(run for _, run in sorted(batch, key=itemgetter(0))) for batch in runs),
        ends=tuple(blocks(batch, lanes.root) for batch in final_lanes),
    )


def _keepers(in_sums: Sequence[Collection[int]], lanes: Lanes) -> dict[int, tuple[int, int]]:
    """Return, by lane, the member whose sum of it counts, and how many of its micro-batches are in it."""
    claims: list[tuple[bool, int, int, Block]] = []
    for member, contents in enumerate(in_sums):
        length = {
            lane: lanes.prefix_length(contents, lane) for lane in {lanes.lane(micro_batch) for micro_batch in contents}
        }
        whole = {lane for lane in length if length[lane] == len(lanes.of(lane))}
        claims += [(False, first - stop, -member, (first, stop)) for first, stop in blocks(whole, lanes.root)]
        claims += [(True, -length[lane], -member, (lane, lane + 1)) for lane in length.keys() - whole if length[lane]]
    keeper: dict[int, tuple[int, int]] = {}
    for is_running, size, member, block in sorted(claims):
        if keeper.keys().isdisjoint(range(*block)):
            keeper |= {lane: (-member, -size if is_running else len(lanes.of(lane))) for lane in range(*block)}
    return keeper


def _chains(
    keeper: Mapping[int, tuple[int, int]], needs: list[int], lanes: Lanes
) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
    """Return, for each lane, the members that compute it, and what; before them the one that keeps its running sum."""
    chains: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    remaining: dict[int, tuple[int, ...]] = {}
    for lane in range(lanes.count):
        remaining[lane], chains[lane] = tuple(lanes.of(lane)), []
        if lane in keeper:
            member, length = keeper[lane]
            stretch = remaining[lane][length:][: needs[member]]
            needs[member] -= len(stretch)
            chains[lane].append((member, stretch))
            remaining[lane] = remaining[lane][length + len(stretch) :]
    member = 0
    for lane, rest in remaining.items():
        while rest:
            while not needs[member]:
                member += 1
            stretch, rest = rest[: needs[member]], rest[needs[member] :]
            needs[member] -= len(stretch)
            chains[lane].append((member, stretch))
    return chains


def stores_needed(runs: Iterable[Run], lanes: Lanes) -> int:
    """Return the most sums that a member holds at a time, when it computes these runs from nothing."""
    low = list(runs)
    sums: Sums[None] = Sums(lambda low, high: None)
    awaited_lanes = {run.lane for run in low if run.source is not None}
    most = len(awaited_lanes)
    for run in low:
        if run.lane not in sums.running and run.lane not in awaited_lanes:
            sums.merge(lanes.root)
        awaited_lanes.discard(run.lane)
        sums.running[run.lane] = None
        most = max(most, len(sums.all_sums()) + len(awaited_lanes))
        if run.target is None:
            sums.end(run.lane)
    return most
