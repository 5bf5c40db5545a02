"""Which replica computes which micro-batch: a pure function that every replica evaluates for itself.

Rules
-----
* What counts is what a replica *holds*: the micro-batches dealt to it in this iteration, whose gradients stand, or
  will stand, in its accumulation. No two replicas ever hold the same one.
* Micro-batches that no replica holds are dealt, in ascending order, each time to the replica that holds the fewest,
  the first in replica order among equals. From nothing held that is the round-robin deal of an iteration's start; among
  survivors that hold equally many it is the round-robin deal of a lost replica's work.
* Nothing is ever taken away from a replica, so no finished work is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def deal(held: Sequence[Sequence[int]], micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """The micro-batches newly dealt to each replica.

    `held[r]`: what replica `r` holds, a subset of range(micro_batches), pairwise disjoint (ValueError if not).
    """
    if not held:
        raise ValueError("held: no replica to deal to")
    taken = [micro_batch for own in held for micro_batch in own]
    if len(set(taken)) != len(taken):
        raise ValueError(f"held: {held} has a micro-batch twice")
    if any(not 0 <= micro_batch < micro_batches for micro_batch in taken):
        raise ValueError(f"held: {held} has a micro-batch outside 0..{micro_batches - 1}")
    counts = [(len(own), replica) for replica, own in enumerate(held)]
    heapify(counts)
    dealt: list[list[int]] = [[] for _ in held]
    for micro_batch in sorted(set(range(micro_batches)).difference(taken)):
        count, replica = counts[0]
        dealt[replica].append(micro_batch)
        heapreplace(counts, (count + 1, replica))
    return tuple(tuple(own) for own in dealt)
