"""Solves how many micro-batches each replica computes, so that an iteration ends soonest: an integer programme, exact.

    minimise  max over r of  factors[r] * counts[r]     so that  sum of counts = micro-batches,  counts[r] >= least

Rules
-----
* `factors` are integers, hundredths of what an ordinary replica takes for a micro-batch: all ranks compute the same,
  whatever their machines make of fractions.
* One micro-batch after the other goes to the replica that would have finished it first, the first in rank order of
  equals. A larger count costs more, so that is exact (an exchange of two micro-batches never gains).
* Of counts that take equally long those nearest to the present ones are taken: what a replica has stays, up to what the
  shortest time allows. What others take over goes to those that finish it first, of these to the nearest by rank: they
  share borders with the replica that is relieved, and all others keep theirs.
* Each replica keeps one micro-batch where there are enough: it goes on being measured, and so is seen to recover. In an
  interleaved pipeline it keeps as many as there are stages: fewer take as long (`megatron/padding.py`).

Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

#: The factor of a replica that takes as long for a micro-batch as most do.
ORDINARY = 100


@dataclass(frozen=True, slots=True)
class Speeds:
    """The replicas' speeds, as the time that each takes for a micro-batch. `factors`: by rank; none: all alike. `fill`:
    the micro-batches' time by which a run takes longer than its micro-batches: the filling of a pipeline."""

    factors: tuple[int, ...] = ()
    fill: int = 0

    @property
    def are_alike(self) -> bool:
        """Return whether all replicas are as fast as each other."""
        return len(set(self.factors)) < 2


#: Of replicas that are alike.
ALIKE = Speeds()


def receivers(counts: Sequence[int], factors: Sequence[int] = ()) -> Iterator[int]:
    """Yield, without end, the member that gets the next micro-batch on top of `counts`: the one that would have
    finished it first, the first of equals. `factors`: () for members that are alike."""
    factors = factors or [ORDINARY] * len(counts)
    heap = [((count + 1) * factor, member) for member, (count, factor) in enumerate(zip(counts, factors, strict=True))]
    heapify(heap)
    while True:
        finish, member = heap[0]
        yield member
        heapreplace(heap, (finish + factors[member], member))


def duration(counts: Sequence[int], times: Sequence[float]) -> float:
    """Return how long the members compute, if each takes `times[rank]` for a micro-batch."""
    return max(count * time for count, time in zip(counts, times, strict=True))


def best_counts(
    factors: Sequence[int], micro_batches: int, present: Sequence[int] = (), least: int = 1
) -> tuple[int, ...]:
    """Return how many micro-batches each member computes. `present`: the counts of now, () for none. `least`: of each,
    where there are enough."""
    least = min(least, micro_batches // len(factors))
    counts = [least] * len(factors)
    for _, member in zip(range(micro_batches - sum(counts)), receivers(counts, factors), strict=False):
        counts[member] += 1
    if not present:
        return tuple(counts)
    shortest = int(duration(counts, factors))
    limits = [max(least, shortest // factor) for factor in factors]
    nearest = [min(max(count, least), limit) for count, limit in zip(present, limits, strict=True)]
    relieved = [member for member, count in enumerate(nearest) if count < present[member]]
    takers = [
        ((nearest[member] + 1) * factors[member], _distance(member, relieved), member)
        for member, limit in enumerate(limits)
        if nearest[member] < limit
    ]
    heapify(takers)
    for _ in range(micro_batches - sum(nearest)):
        finish, distance, member = takers[0]
        nearest[member] += 1
        if nearest[member] < limits[member]:
            heapreplace(takers, (finish + factors[member], distance, member))
        else:
            heappop(takers)
    return tuple(nearest)


def _distance(member: int, peers: Sequence[int]) -> int:
    """Return how far the nearest of the peers, in order, is from the member; 0 where there is none."""
    place = bisect_left(peers, member)
    return min((abs(member - peer) for peer in peers[max(0, place - 1) : place + 1]), default=0)
