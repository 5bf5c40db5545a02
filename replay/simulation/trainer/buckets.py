"""An iteration's gradients, bucket by bucket, as agents/trainer/gradients/reduction.py and accumulation.py keep them.

A gradient is modelled by its summands. Where the sum follows the assignment: how often each micro-batch is in it; a sum
over all replicas is right where every micro-batch is in it exactly once. Where it is fixed (lanes.py): a symbol, and
sums of symbols depend on their order and their brackets; it is right where it is the reference's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from unicrond.agents.trainer.lifecycle.lanes import Block, Lanes, Sums, halves, tree
from unicrond.replay.simulation.trainer.group import End, Result, Row

#: A sum: per micro-batch, how often it is in it; or its symbol, alone.
Sum: TypeAlias = tuple[int, ...]
BUCKETS = 3


class Buckets:
    """One replica's accumulation and the sums over all replicas."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._accumulated: list[list[int]] = []
        self._final: dict[int, Sum] = {}
        self._pending: dict[int, Result] = {}
        self._queue: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Begin a new iteration."""
        self._accumulated = [[0] * self._micro_batches for _ in range(BUCKETS)]
        self._final = {}
        self._schedule_reductions()

    def add(self, micro_batch: int, lane: int) -> None:
        """Add a micro-batch's gradients to every bucket; where a final sum is dropped, it is computed again from
        these."""
        for counts in self._accumulated:
            counts[micro_batch] += 1

    def start_next(self, end: End, timeout_s: float) -> bool:
        """Send this replica's share of the next bucket; return False if all are pending or final."""
        if not self._queue:
            return False
        bucket = self._queue.pop(0)
        self._pending[bucket] = end.gather(self._share(bucket, end.rank), timeout_s)
        return True

    @property
    def settled(self) -> bool:
        """Check that one bucket has failed, or that all have arrived."""
        return bool(self.error) or all(result.is_settled for result in self._pending.values())

    @property
    def error(self) -> str:
        """Return why a bucket has failed, "" if none has."""
        return next((result.error for result in self._pending.values() if result.error), "")

    def complete(self) -> dict[int, Sum]:
        """Return the sums that are complete here, final ones among them."""
        whole_sums = {
            bucket: self._sum(result.rows) for bucket, result in self._pending.items() if result.rows is not None
        }
        return self._final | whole_sums

    def keep(self, final: Collection[int], valid: Collection[int]) -> None:
        """Make these buckets final; the others are reduced again. `valid`: with lanes, the micro-batches whose sums
        count."""
        complete = self.complete()
        self._final = {bucket: complete[bucket] for bucket in final}
        self._schedule_reductions()

    def are_right(self) -> bool:
        """Check that all are complete, and each is what it has to be."""
        complete = self.complete()
        return len(complete) == BUCKETS and all(self._is_right(bucket, total) for bucket, total in complete.items())

    def _share(self, bucket: int, rank: int) -> Row:
        return self._accumulated[bucket]

    def _sum(self, rows: Sequence[Row]) -> Sum:
        return tuple(sum(counts) for counts in zip(*rows, strict=True))

    def _is_right(self, bucket: int, total: Sum) -> bool:
        return set(total) == {1}

    def _schedule_reductions(self) -> None:
        self._pending = {}
        self._queue = [bucket for bucket in reversed(range(BUCKETS)) if bucket not in self._final]


class LaneBuckets(Buckets):
    """Buckets of a fixed sum. `sums`: of each block and lane, a symbol for each bucket. `ends`: the blocks that each
    member has; `ending`: lanes whose running sums are whole. `ahead`: those of micro-batches computed ahead."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.sums: Sums[Sum] = Sums(_combine)
        self.ends: Sequence[Sequence[Block]] = ()
        self.ending: Collection[int] = ()
        self.ahead: list[Sum] = []
        self._is_ahead = False
        super().__init__(lanes.micro_batches)

    def begin(self) -> None:
        """Begin a new iteration."""
        self.sums, self.ahead = Sums(_combine), []
        super().begin()

    def enter_lane(self, lane: int) -> None:
        """Count gradients for this lane from now on."""
        if lane not in self.sums.running:
            self.sums.merge(self.lanes.root)
            self.sums.running[lane] = (0,) * BUCKETS
        self.ending, self._is_ahead = (lane,), False

    def go_ahead(self) -> None:
        """Store gradients separately from now on."""
        self._is_ahead = True

    def continue_lane(self, lane: int, symbols: Sum) -> None:
        """Continue from the lane's running sum `symbols`; what was computed ahead is added to it, in its order."""
        for ahead in self.ahead:
            symbols = _combine(symbols, ahead)
        self.sums.running[lane], self.ahead = symbols, []

    def add(self, micro_batch: int, lane: int) -> None:
        """Add a micro-batch's gradients to every bucket of the lane's running sum."""
        if self._is_ahead:
            self.ahead.append(_gradients(micro_batch))
            return
        self.sums.running[lane] = _combine(self.sums.running[lane], _gradients(micro_batch))

    def end(self, lane: int) -> None:
        """Mark the lane as whole."""
        self.sums.end(lane)
        self.ending = ()

    def keep(self, final: Collection[int], valid: Collection[int]) -> None:
        """Make these buckets final; the others are reduced again."""
        super().keep(final, valid)
        self.sums.keep(valid, self.lanes)
        self.ending, self.ahead = (), []

    def _share(self, bucket: int, rank: int) -> Row:
        sums = self.sums.by_block(self.ending)
        return [tree(block, sums, _combine)[bucket] for block in self.ends[rank]]

    def _sum(self, rows: Sequence[Row]) -> Sum:
        pieces: dict[Block, Sum] = {}
        for blocks, row in zip(self.ends, rows, strict=True):
            pieces |= {block: (value,) for block, value in zip(blocks, row, strict=True)}
        return tree(self.lanes.root, pieces, _combine)

    def _is_right(self, bucket: int, total: Sum) -> bool:
        return total == (self._reference(self.lanes.root)[bucket],)

    def _reference(self, block: Block) -> Sum:
        if block[1] - block[0] > 1:
            first_half, second_half = halves(block)
            return _combine(self._reference(first_half), self._reference(second_half))
        total: Sum = (0,) * BUCKETS
        for micro_batch in self.lanes.of(block[0]):
            total = _combine(total, _gradients(micro_batch))
        return total


def _gradients(micro_batch: int) -> Sum:
    return tuple(hash((bucket, micro_batch)) for bucket in range(BUCKETS))


def _combine(first: Sum, second: Sum) -> Sum:
    return tuple(map(hash, zip(first, second, strict=True)))
