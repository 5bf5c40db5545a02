"""Lanes: the order in which a step's gradients are added up, whoever computes them.

Rules
-----
* A task has V *lanes*, a constant of its own. Lane v is the run of micro-batches [v B / V, (v + 1) B / V), rounded
  down, of an iteration's B. Its sum is ((0 + g) + g) + ... in their order.
* Lanes are added by a fixed tree: the sum of lanes [first, stop) is that of as many of them as the largest power of two
  below their number, plus that of the rest. A *block* is a node of that tree.
* So the bits of a step's sum depend on the micro-batches' gradients and on V, and on nothing else. Whatever is done
  elsewhere computes this, for each element.
* What a member has of an iteration are sums of blocks, and *running sums*: of the first micro-batches of a lane. The
  micro-batches in them say which: its blocks are the largest that they fill.

Pure. What does not live here: who computes which micro-batch (`micro_batch_assignment.py`), and the sums themselves
(`accumulation.py`, and `replay/simulation/trainer/buckets.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
#: Lanes [first, stop).
Block: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lanes:
    """A partition of an iteration's `micro_batches` into `count` lanes; there are at least as many micro-batches as
    lanes."""

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
