"""Lanes: what the sum of a step is, whoever computes it; and who computes it.

Rules (the sum)
---------------
* A task has V *lanes*, a constant of its own. Lane v is the run of micro-batches [v B / V, (v + 1) B / V), rounded
  down, of an iteration's B. Its sum is ((0 + g) + g) + ... in their order.
* Lanes are added by a fixed tree: the sum of lanes [first, stop) is that of as many of them as the largest power of two
  below their number, plus that of the rest. A *block* is a node of that tree.
* So the bits of a step's sum depend on the micro-batches' gradients and on V, and on nothing else. Whatever is done
  below computes this, for each element.

Rules (who computes it)
-----------------------
* What a member has of an iteration are sums of blocks, and *running sums*: of the first micro-batches of a lane. The
  micro-batches in them say which: its blocks are the largest that they fill.
* A *run* is consecutive micro-batches of one lane, computed by one member on top of the running sum before them. The
  runs of a lane make a *chain*: each member gives the running sum to the next, and keeps its own, in case that one is
  lost. A member's runs are ordered by their place in the chain, of equals first those that it gives away: so it waits
  for a sum only where it has nothing else left, and no members ever wait in a circle.
* While it waits it goes *ahead*: it computes the next micro-batches of that run, at most AHEAD of them, each apart, and
  adds them in their order when the sum is here. What has been computed ahead stands in no sum until then.
* A new group deals anew what stands in no sum. What a member has stays where it is, unless another has more of it: the
  largest blocks count first, then the longest running sums. Each member gets as many micro-batches as make the members
  even; of these those that continue its own running sums, then a stretch of what is left, in the members' order.
* From empty hands each member gets one stretch, and where there are as many members as lanes and the lanes are of one
  length, each gets a lane.
* When all is computed, each lane's sum is at one member. It adds up what blocks it can (`ends`); the others are
  exchanged and added in the tree's order (`reduction.py`).

Pure. What does not live here: the sums themselves (`accumulation.py`, and `replay/simulation/trainer/buckets.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from operator import itemgetter
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
#: Micro-batches that are computed ahead.
AHEAD = 2
#: Lanes [first, stop).
Block: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lanes:
    """`count` lanes of an iteration's `micro_batches`, which are at least as many."""

    micro_batches: int
    count: int

    def of(self, lane: int) -> range:
        """Return the lane's micro-batches."""
        return range(lane * self.micro_batches // self.count, (lane + 1) * self.micro_batches // self.count)

    def lane(self, micro_batch: int) -> int:
        """Return the lane of the micro-batch."""
        return ((micro_batch + 1) * self.count - 1) // self.micro_batches

    def prefix_length(self, in_sums: Collection[int], lane: int) -> int:
        """Return how many of the lane's first micro-batches are in `in_sums`."""
        return next(
            (length for length, micro_batch in enumerate(self.of(lane)) if micro_batch not in in_sums),
            len(self.of(lane)),
        )

    @property
    def root(self) -> Block:
        """Return the block of all lanes."""
        return 0, self.count


def halves(block: Block) -> tuple[Block, Block]:
    """Return the two blocks whose sum a block of several lanes is."""
    first, stop = block
    middle = first + (1 << (stop - first - 1).bit_length() - 1)
    return (first, middle), (middle, stop)


def blocks(lanes: Iterable[int], within: Block) -> tuple[Block, ...]:
    """Return the largest blocks that these lanes fill, in order."""
    return tuple(_blocks(sorted(lanes), within))


def _blocks(lanes: Sequence[int], within: Block) -> Iterator[Block]:
    """Yield the largest blocks that `lanes`, in order, fill."""
    first, stop = within
    count = bisect_left(lanes, stop) - bisect_left(lanes, first)
    if count == stop - first:
        yield within
    elif count:
        for half in halves(within):
            yield from _blocks(lanes, half)


def tree(block: Block, sums: Mapping[Block, T], add: Callable[[T, T], T]) -> T:
    """Return the block's sum, from those of blocks that it is made of. Raises KeyError where one is missing."""
    if block in sums or block[1] - block[0] == 1:
        return sums[block]
    low, high = halves(block)
    return add(tree(low, sums, add), tree(high, sums, add))


# --- dealing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive micro-batches of `lane`; none where a member only gives away what it has. `source`: the member that
    gives the running sum before them, None: it is here, or 0. `target`: the member that goes on with it."""

    lane: int
    micro_batches: tuple[int, ...]
    source: int | None = None
    target: int | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """What each member of a group has and does, by rank. `valid`: the micro-batches in those of its sums that count.
    `runs`: in the order in which they are computed. `ends`: the blocks whose sums it has when all is computed."""

    valid: tuple[frozenset[int], ...]
    runs: tuple[tuple[Run, ...], ...]
    ends: tuple[tuple[Block, ...], ...]

    def micro_batches(self, member: int) -> tuple[int, ...]:
        """Return the micro-batches that the member is to compute, in their order."""
        return tuple(micro_batch for run in self.runs[member] for micro_batch in run.micro_batches)


@lru_cache(maxsize=8)
def initial_assignment(members: int, lanes: Lanes) -> Assignment:
    """Return the assignment of an iteration of which no member has anything."""
    return assign([()] * members, lanes)


def assign(in_sums: Sequence[Collection[int]], lanes: Lanes) -> Assignment:
    """Return the assignment for members whose sums have `in_sums[member]`: of each lane the first micro-batches. Raises
    ValueError without a member."""
    if not in_sums:
        raise ValueError("done: no member to deal to")
    keeper = _keepers(in_sums, lanes)
    valid: list[set[int]] = [set() for _ in in_sums]
    for lane, (member, length) in keeper.items():
        valid[member].update(lanes.of(lane)[:length])
    runs: list[list[tuple[tuple[int, bool, int], Run]]] = [[] for _ in in_sums]
    final_lanes: list[set[int]] = [set() for _ in in_sums]
    for lane, chain in _chains(keeper, _needs([len(batch) for batch in valid], lanes.micro_batches), lanes).items():
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


def _needs(counts: Sequence[int], micro_batches: int) -> list[int]:
    """Return how many micro-batches each member gets, to have as many as the others: each goes to the member with the
    fewest, the first of equals."""
    heap = [(count, member) for member, count in enumerate(counts)]
    heapify(heap)
    needs = [0] * len(counts)
    for _ in range(micro_batches - sum(counts)):
        count, member = heap[0]
        needs[member] += 1
        heapreplace(heap, (count + 1, member))
    return needs


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
            member = next(candidate for candidate in range(member, len(needs)) if needs[candidate])
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


# --- what a member has ---------------------------------------------------------------------------


class Sums(Generic[T]):
    """One member's sums of an iteration: `of_blocks`, and `running`, by lane. `add(left, right)`: their sum."""

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.of_blocks: dict[Block, T] = {}
        self.running: dict[int, T] = {}

    def end(self, lane: int) -> None:
        """Make the lane's running sum the lane's sum."""
        self.of_blocks[lane, lane + 1] = self.running.pop(lane)

    def merge(self, within: Block) -> None:
        """Add up the sums that make a block."""
        if within not in self.of_blocks and within[1] - within[0] > 1:
            low, high = halves(within)
            self.merge(low)
            self.merge(high)
            if low in self.of_blocks and high in self.of_blocks:
                self.of_blocks[within] = self._add(self.of_blocks.pop(low), self.of_blocks.pop(high))

    def keep(self, valid: Collection[int], lanes: Lanes) -> list[T]:
        """Keep only the sums that are made of these micro-batches; return the others."""
        whole = [block for block in self.of_blocks if lanes.of(block[0])[0] not in valid]
        partial = [lane for lane in self.running if lanes.of(lane)[0] not in valid]
        return [*map(self.of_blocks.pop, whole), *map(self.running.pop, partial)]

    def all_sums(self) -> list[T]:
        """Return all sums, of blocks and running ones."""
        return [*self.of_blocks.values(), *self.running.values()]

    def by_block(self, lanes: Iterable[int] = ()) -> dict[Block, T]:
        """Return all whole sums by block, the running sums of these lanes included."""
        return self.of_blocks | {(lane, lane + 1): self.running[lane] for lane in lanes}
