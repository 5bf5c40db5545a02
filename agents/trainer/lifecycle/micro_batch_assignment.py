"""Which member of a group computes which micro-batch of an iteration: pure functions that every rank calls for itself.

Rules (both modes)
------------------
* Each micro-batch of an iteration is assigned exactly once. What a member has stays where it is, so that no finished
  work is computed twice; what no member has is assigned anew.
* It is assigned by speed (`programme.py`) where members are not alike (`deal.py`), else evenly: each next micro-batch
  counts for the member that has the fewest, the first in rank order among equals.

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
* Where members are not alike, all stretches are moved by the part of a lane with which all are done soonest, waits for
  running sums included: behind a slow member's part of a lane, much would else be left that has to wait for it.
* When all is computed, each lane's sum is at one member. It adds up what blocks it can (`ends`); the others are
  exchanged and added in the tree's order (`reduction.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

from unicrond.agents.trainer.lifecycle.lanes import Block, Lanes, Sums, blocks
from unicrond.agents.trainer.lifecycle.programme import ALIKE, Speeds, best_counts, receivers

#: Micro-batches that are computed ahead.
AHEAD = 2
#: Places in a lane at which the members' stretches may begin.
_STARTS = 16
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
    assignments: Sequence[Sequence[int]], in_sums: Sequence[Sequence[int]], micro_batches: int, lanes: Lanes | None,
    speeds: Speeds = ALIKE,
) -> tuple[Batches, Assignment | None]:  # fmt: skip
    """Return what each member is to compute on top of what it has, and with lanes the whole assignment.

    `assignments`, `in_sums`: by rank, what was assigned to each member and what stands in its sums. Raises ValueError.
    """
    if lanes is None:
        return assign_evenly(assignments, micro_batches, speeds.factors), None
    assignment = assign_lanes(in_sums, lanes, speeds)
    return tuple(map(assignment.micro_batches, range(len(in_sums)))), assignment


def assign_evenly(assignments: Sequence[Sequence[int]], micro_batches: int, factors: Sequence[int] = ()) -> Batches:
    """Return the micro-batches newly assigned to each replica.

    `assignments[r]`: what replica `r` has, a subset of range(micro_batches), pairwise disjoint (ValueError if not).
    `factors`: of their speeds; () where they are alike.
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
    for micro_batch, replica in zip(
        unassigned, receivers([len(batch) for batch in assignments], factors), strict=False
    ):
        additions[replica].append(micro_batch)
    return tuple(tuple(batch) for batch in additions)


def deal_counts(counts: Sequence[int]) -> Batches:
    """Return so many micro-batches for each replica, in turns: where they are even, round-robin."""
    batches: list[list[int]] = [[] for _ in counts]
    micro_batch = 0
    while micro_batch < sum(counts):
        for batch, count in zip(batches, counts, strict=True):
            if len(batch) < count:
                batch.append(micro_batch)
                micro_batch += 1
    return tuple(map(tuple, batches))


@lru_cache(maxsize=8)
def initial_assignment(members: int, lanes: Lanes, speeds: Speeds = ALIKE, counts: tuple[int, ...] = ()) -> Assignment:
    """Return the assignment of an iteration of which no member has anything. `counts`: of micro-batches for each
    member; () for what their speeds say."""
    return assign_lanes([()] * members, lanes, speeds, counts)


def assign_lanes(
    in_sums: Sequence[Collection[int]], lanes: Lanes, speeds: Speeds = ALIKE, counts: Sequence[int] = ()
) -> Assignment:
    """Return the assignment for members whose sums have `in_sums[member]`: of each lane the first micro-batches. Raises
    ValueError without a member."""
    if not in_sums:
        raise ValueError("in_sums: no member to assign to")
    keeper = _keepers(in_sums, lanes)
    valid: list[set[int]] = [set() for _ in in_sums]
    for lane, (member, length) in keeper.items():
        valid[member].update(lanes.of(lane)[:length])
    needs = counts or _needs(valid, lanes, speeds)
    chains = [_chains(keeper, needs, lanes, start) for start in _starts(keeper, lanes, speeds)]
    arrangements = [_arrange(by_lane, valid, lanes) for by_lane in chains if _are_sound(by_lane)]
    return min(arrangements, key=lambda arrangement: time_needed(arrangement.runs, speeds))


def _needs(valid: Sequence[Collection[int]], lanes: Lanes, speeds: Speeds) -> list[int]:
    """Return how many micro-batches each member gets on top of what is valid."""
    present = [len(batch) for batch in valid]
    if speeds.factors and not any(present):
        return list(best_counts(speeds.factors, lanes.micro_batches))
    needs = [0] * len(valid)
    missing = range(lanes.micro_batches - sum(present))
    for _, member in zip(missing, receivers(present, speeds.factors), strict=False):
        needs[member] += 1
    return needs


def _starts(keeper: Mapping[int, tuple[int, int]], lanes: Lanes, speeds: Speeds) -> list[int]:
    """Return the micro-batches at which the first member's stretch may begin: 0; and, where nothing is computed yet and
    members are not alike, others of the first lane."""
    if speeds.are_alike or keeper:
        return [0]
    return sorted({start * len(lanes.of(0)) // _STARTS for start in range(_STARTS)})


def _are_sound(chains: Mapping[int, Sequence[tuple[int, tuple[int, ...]]]]) -> bool:
    """Return whether no member has two parts of a lane: it would wait for itself."""
    return all(len({member for member, _ in chain}) == len(chain) for chain in chains.values())


def _arrange(
    chains: Mapping[int, Sequence[tuple[int, tuple[int, ...]]]], valid: Sequence[Collection[int]], lanes: Lanes
) -> Assignment:
    """Return the assignment by which each lane is computed by its chain."""
    runs: list[list[tuple[tuple[int, bool, int], Run]]] = [[] for _ in valid]
    final_lanes: list[set[int]] = [set() for _ in valid]
    for lane, chain in chains.items():
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


def time_needed(runs: Sequence[Sequence[Run]], speeds: Speeds) -> int:
    """Return when all members have computed their runs: in hundredths of an ordinary micro-batch's time, with their
    waits for running sums, without what these take on the way."""
    factors = speeds.factors or [1] * len(runs)
    clocks = [0] * len(runs)
    remaining = [list(reversed(batch)) for batch in runs]
    arrivals: dict[tuple[int, int], int] = {}
    while any(remaining):
        for member, batch in enumerate(remaining):
            while batch and (batch[-1].source is None or (batch[-1].lane, member) in arrivals):
                run, factor = batch.pop(), factors[member]
                length = len(run.micro_batches) + (speeds.fill if run.micro_batches else 0)
                wait = 0 if run.source is None else arrivals[run.lane, member] - clocks[member]
                if wait > 0:
                    ahead = 0 if speeds.fill else min(AHEAD, length, -(-wait // factor))
                    clocks[member] += max(wait, ahead * factor)
                    length -= ahead
                clocks[member] += length * factor
                if run.target is not None:
                    arrivals[run.lane, run.target] = clocks[member]
    return max(clocks)


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
    keeper: Mapping[int, tuple[int, int]], counts: Sequence[int], lanes: Lanes, start: int = 0
) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
    """Return, for each lane, the members that compute it, and what; before them the one that keeps its running sum.
    `counts`: of what each member computes; `start`: the micro-batch at which the first one's stretch begins."""
    needs = list(counts)
    chains: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    remaining: list[int] = []
    for lane in range(lanes.count):
        rest, chains[lane] = tuple(lanes.of(lane)), []
        if lane in keeper:
            member, length = keeper[lane]
            stretch = rest[length:][: needs[member]]
            needs[member] -= len(stretch)
            chains[lane].append((member, stretch))
            rest = rest[length + len(stretch) :]
        remaining += rest
    owners = [member for member, need in enumerate(needs) for _ in range(need)]
    shift = len(owners) - start
    for (lane, member), batch in groupby(
        zip(remaining, [*owners[shift:], *owners[:shift]], strict=True), lambda pair: (lanes.lane(pair[0]), pair[1])
    ):
        chains[lane].append((member, tuple(micro_batch for micro_batch, _ in batch)))
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
