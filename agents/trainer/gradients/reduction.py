"""The sums of one iteration's gradients over all replicas, bucket by bucket.

Rules
-----
* A bucket is *started* when a copy of this replica's share is on its way through the group, *complete* here when the
  sum has arrived, and *final* when it is complete on every member that is left (`verdict.py`): then it is not
  reduced again, whichever member is lost.
* Buckets are started from the last to the first, the order in which a backward finishes them, and never otherwise: a
  collective must be every member's n-th. One that is ready before its turn waits for it.
* `overlap` starts buckets inside the backward of the last micro-batches, each as soon as its gradients are there;
  `start` starts the others. Neither ever raises: a broken group shows where it is waited for (`Group.finish`).
* `keep` throws away everything but the final sums. What is still in flight then writes into copies without a reader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from agents.trainer.gradients.accumulation import Accumulation
from agents.trainer.groups.group import Group, Operation


class Reduction:
    """An iteration's sums."""

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        #: Called after each start, inside a backward or not (for ordered faults).
        self.started_one: Callable[[], None] = _nothing
        self._group: Group | None = None
        self._final: dict[int, torch.Tensor] = {}
        self._under_way: dict[int, tuple[torch.Tensor, Operation]] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._turns: list[int] = []
        self._waiting: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """A new iteration."""
        self._final = {}
        self._norms = {}
        self._again()

    def overlap(self, group: Group, gradients: int) -> None:
        """The last of this replica's micro-batches are about to be computed: `gradients` per parameter."""
        self._group = group
        self._accumulation.expect(gradients, self._ready)

    def start(self, group: Group) -> None:
        """Start every bucket that is not final and not started."""
        self._group = group
        self._accumulation.expect(0, None)
        self._waiting.update(self._turns)
        self._start_in_turn()

    def complete(self) -> dict[int, torch.Tensor]:
        """The sums that are complete here, final ones among them."""
        arrived = {bucket: copy for bucket, (copy, operation) in self._under_way.items() if operation.succeeded}
        return self._final | arrived

    def sums(self) -> list[torch.Tensor]:
        """All sums in the buckets' order. Raises KeyError unless all are complete."""
        complete = self.complete()
        return [complete[bucket] for bucket in range(len(self._accumulation))]

    def norm(self) -> float:
        """The norm of this replica's own share, as it was when each bucket was started first; 0 in exact mode."""
        return float(torch.linalg.vector_norm(torch.stack([*self._norms.values()]))) if self._norms else 0.0

    def keep(self, final: Collection[int]) -> None:
        """These buckets are final, all others are to be reduced again."""
        complete = self.complete()
        self._final = {bucket: complete[bucket] for bucket in final}
        self._again()

    def _again(self) -> None:
        self._under_way = {}
        self._turns = [bucket for bucket in reversed(range(len(self._accumulation))) if bucket not in self._final]
        self._waiting = set()
        self._group = None
        self._accumulation.expect(0, None)

    def _ready(self, bucket: int) -> None:
        self._waiting.add(bucket)
        self._start_in_turn()

    def _start_in_turn(self) -> None:
        assert self._group is not None
        while self._turns and self._turns[0] in self._waiting:
            bucket = self._turns.pop(0)
            copy = self._accumulation.copy(bucket)
            if copy.is_floating_point() and bucket not in self._norms:
                self._norms[bucket] = torch.linalg.vector_norm(copy)
            self._under_way[bucket] = (copy, self._group.all_reduce(copy))
            self.started_one()


def _nothing() -> None:
    pass
