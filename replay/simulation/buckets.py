"""An iteration's gradients, bucket by bucket, as agents/trainer/gradients/reduction.py and accumulation.py keep them.

A gradient is modelled by what it is made of. Where the sum follows the deal: how often each micro-batch is in it; a sum
over all replicas is right where every micro-batch is in it exactly once. Where it is fixed (lanes.py): a symbol, and
sums of symbols depend on their order and their brackets; it is right where it is the reference's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from agents.trainer.gradients.lanes import Block, Lanes, Sums, halves, tree
from replay.simulation.group import End, Result, Row

#: Of a sum: per micro-batch, how often it is in it; or its symbol, alone.
Sum: TypeAlias = tuple[int, ...]
BUCKETS = 3


class Buckets:
    """One replica's accumulation and the sums over all replicas."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._accumulated: list[list[int]] = []
        self._final: dict[int, Sum] = {}
        self._under_way: dict[int, Result] = {}
        self._turns: list[int] = []
        self.begin()

    def begin(self) -> None:
        """A new iteration."""
        self._accumulated = [[0] * self._micro_batches for _ in range(BUCKETS)]
        self._final = {}
        self._again()

    def add(self, micro_batch: int, lane: int) -> None:
        """Its gradients, to every bucket: a final sum may be given up, and is then made again from these."""
        for counts in self._accumulated:
            counts[micro_batch] += 1

    def start_next(self, end: End, timeout_s: float) -> bool:
        """Send this replica's share of the next bucket; False if all are under way or final."""
        if not self._turns:
            return False
        bucket = self._turns.pop(0)
        self._under_way[bucket] = end.gather(self._share(bucket, end.rank), timeout_s)
        return True

    @property
    def settled(self) -> bool:
        """One has failed, or all have arrived."""
        return bool(self.error) or all(result.over for result in self._under_way.values())

    @property
    def error(self) -> str:
        """Why one has failed."""
        return next((result.error for result in self._under_way.values() if result.error), "")

    def complete(self) -> dict[int, Sum]:
        """The sums that are complete here, final ones among them."""
        arrived = {
            bucket: self._sum(result.rows) for bucket, result in self._under_way.items() if result.rows is not None
        }
        return self._final | arrived

    def keep(self, final: Collection[int], kept: Collection[int]) -> None:
        """These are final; the others are reduced again. `kept`: with lanes, the micro-batches whose sums count."""
        complete = self.complete()
        self._final = {bucket: complete[bucket] for bucket in final}
        self._again()

    def are_right(self) -> bool:
        """All are complete, and each is what it has to be."""
        complete = self.complete()
        return len(complete) == BUCKETS and all(self._is_right(bucket, found) for bucket, found in complete.items())

    def _share(self, bucket: int, rank: int) -> Row:
        return self._accumulated[bucket]

    def _sum(self, rows: Sequence[Row]) -> Sum:
        return tuple(sum(counts) for counts in zip(*rows, strict=True))

    def _is_right(self, bucket: int, found: Sum) -> bool:
        return set(found) == {1}

    def _again(self) -> None:
        self._under_way = {}
        self._turns = [bucket for bucket in reversed(range(BUCKETS)) if bucket not in self._final]


class LaneBuckets(Buckets):
    """As `Buckets`, of a fixed sum. `sums`: of each block and lane, a symbol for each bucket. `ends`: the blocks that
    each member has; `ending`: lanes whose running sums are whole. `ahead`: of micro-batches computed ahead."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.sums: Sums[Sum] = Sums(_added)
        self.ends: Sequence[Sequence[Block]] = ()
        self.ending: Collection[int] = ()
        self.ahead: list[Sum] = []
        self._is_ahead = False
        super().__init__(lanes.micro_batches)

    def begin(self) -> None:
        """A new iteration."""
        self.sums, self.ahead = Sums(_added), []
        super().begin()

    def turn(self, lane: int) -> None:
        """From now on gradients are the lane's."""
        if lane not in self.sums.running:
            self.sums.merge(self.lanes.root)
            self.sums.running[lane] = (0,) * BUCKETS
        self.ending, self._is_ahead = (lane,), False

    def go_ahead(self) -> None:
        """From now on gradients are kept apart."""
        self._is_ahead = True

    def go_on(self, lane: int, symbols: Sum) -> None:
        """That is the lane's running sum; what was computed ahead is added to it, in its order."""
        for ahead in self.ahead:
            symbols = _added(symbols, ahead)
        self.sums.running[lane], self.ahead = symbols, []

    def add(self, micro_batch: int, lane: int) -> None:
        """Its gradients, to every bucket of the lane's running sum."""
        if self._is_ahead:
            self.ahead.append(_gradients(micro_batch))
            return
        self.sums.running[lane] = _added(self.sums.running[lane], _gradients(micro_batch))

    def end(self, lane: int) -> None:
        """The lane is whole."""
        self.sums.end(lane)
        self.ending = ()

    def keep(self, final: Collection[int], kept: Collection[int]) -> None:
        """These are final; the others are reduced again."""
        super().keep(final, kept)
        self.sums.keep(kept, self.lanes)
        self.ending, self.ahead = (), []

    def _share(self, bucket: int, rank: int) -> Row:
        sums = self.sums.ended(self.ending)
        return [tree(block, sums, _added)[bucket] for block in self.ends[rank]]

    def _sum(self, rows: Sequence[Row]) -> Sum:
        pieces: dict[Block, Sum] = {}
        for blocks, row in zip(self.ends, rows, strict=True):
            pieces |= {block: (value,) for block, value in zip(blocks, row, strict=True)}
        return tree(self.lanes.root, pieces, _added)

    def _is_right(self, bucket: int, found: Sum) -> bool:
        return found == (self._reference(self.lanes.root)[bucket],)

    def _reference(self, block: Block) -> Sum:
        if block[1] - block[0] > 1:
            left, right = halves(block)
            return _added(self._reference(left), self._reference(right))
        total: Sum = (0,) * BUCKETS
        for micro_batch in self.lanes.of(block[0]):
            total = _added(total, _gradients(micro_batch))
        return total


def _gradients(micro_batch: int) -> Sum:
    return tuple(hash((bucket, micro_batch)) for bucket in range(BUCKETS))


def _added(left: Sum, right: Sum) -> Sum:
    return tuple(map(hash, zip(left, right, strict=True)))
