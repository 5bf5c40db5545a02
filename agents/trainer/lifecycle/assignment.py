"""Which replica computes which micro-batch: a pure function that every replica evaluates for itself.

Rules
-----
* What counts is what a replica *holds*: the micro-batches assigned to it in this iteration, whose gradients stand, or
  will stand, in its accumulation. No two replicas ever hold the same one.
* Micro-batches that no replica holds are assigned, in ascending order, each time to the replica that holds the fewest,
  the first in replica order among equals. From nothing held that is the round-robin assignment of an iteration's start;
  among survivors that hold equally many it is the round-robin assignment of a lost replica's work.
* Nothing is ever taken away from a replica, so no finished work is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def assign(assignments: Sequence[Sequence[int]], micro_batches: int) -> tuple[tuple[int, ...], ...]:
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
    counts = [(len(batch), replica) for replica, batch in enumerate(assignments)]
    heapify(counts)
    additions: list[list[int]] = [[] for _ in assignments]
    for micro_batch in sorted(set(range(micro_batches)).difference(present)):
        count, replica = counts[0]
        additions[replica].append(micro_batch)
        heapreplace(counts, (count + 1, replica))
    return tuple(tuple(batch) for batch in additions)
