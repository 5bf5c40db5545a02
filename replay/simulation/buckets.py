"""An iteration's gradients, bucket by bucket, as agents/trainer/gradients/reduction.py and accumulation.py keep them.

A gradient is modelled by what it is made of: how often each micro-batch is in it. A sum over all replicas is right
where every micro-batch is in it exactly once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

from replay.simulation.group import End, Result

#: Per micro-batch, how often it is in a sum.
Counts: TypeAlias = tuple[int, ...]
BUCKETS = 3


class Buckets:
    """One replica's accumulation and the sums over all replicas."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._accumulated: list[list[int]] = []
        self._final: dict[int, Counts] = {}
        self._under_way: dict[int, Result] = {}
        self._turns: list[int] = []
        self.begin()

    def begin(self) -> None:
        """A new iteration."""
        self._accumulated = [[0] * self._micro_batches for _ in range(BUCKETS)]
        self._final = {}
        self._again()

    def add(self, micro_batch: int) -> None:
        """Its gradients, to every bucket: a final sum may be given up, and is then made again from these."""
        for counts in self._accumulated:
            counts[micro_batch] += 1

    def start_next(self, end: End, timeout_s: float) -> bool:
        """Send this replica's share of the next bucket; False if all are under way or final."""
        if not self._turns:
            return False
        bucket = self._turns.pop(0)
        self._under_way[bucket] = end.gather(self._accumulated[bucket], timeout_s)
        return True

    @property
    def settled(self) -> bool:
        """One has failed, or all have arrived."""
        return bool(self.error) or all(result.over for result in self._under_way.values())

    @property
    def error(self) -> str:
        """Why one has failed."""
        return next((result.error for result in self._under_way.values() if result.error), "")

    def complete(self) -> dict[int, Counts]:
        """The sums that are complete here, final ones among them."""
        arrived = {
            bucket: tuple(sum(counts) for counts in zip(*result.rows, strict=True))
            for bucket, result in self._under_way.items()
            if result.rows is not None
        }
        return self._final | arrived

    def keep(self, final: Collection[int]) -> None:
        """These are final; the others are reduced again."""
        complete = self.complete()
        self._final = {bucket: complete[bucket] for bucket in final}
        self._again()

    def are_right(self) -> bool:
        """All are complete, and each has every micro-batch once."""
        complete = self.complete()
        return len(complete) == BUCKETS and all(set(counts) == {1} for counts in complete.values())

    def _again(self) -> None:
        self._under_way = {}
        self._turns = [bucket for bucket in reversed(range(BUCKETS)) if bucket not in self._final]
