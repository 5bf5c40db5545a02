"""How many gradients a worker holds at a time: known from the task and its replicas before it starts.

Rules
-----
* A worker holds *sums*, each in fp32 and as large as its part of the parameters, and one *result*: what all replicas
  have given together.
* Where the sum follows the deal there is one sum. Where it is fixed (`agents/trainer/lifecycle/lanes.py`) a replica
  computes a stretch of micro-batches: it has a sum for each lane that it shares with another replica, one for the lane
  that it computes, and one for each block of whole lanes that wait to be added up.
* While a loss is healed a replica also has parts of lost lanes: one more sum, seldom two.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from unicrond.events.vocabulary import TaskSpec

#: Bytes of each element of a sum, and of the result.
ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the fullest worker holds. `healing`: besides, while a loss is healed."""

    sums: int
    healing: int
    results: int = 1

    @property
    def most(self) -> int:
        """The most gradients of its part of the parameters that it holds."""
        return self.sums + self.healing + self.results


def gradients(spec: TaskSpec, replicas: int) -> Gradients:
    """Return what the fullest worker holds of the task on so many replicas, one or more."""
    if not spec.lanes:
        return Gradients(1, 0)
    return Gradients(most_sums(spec.micro_batches, spec.lanes, replicas), int(replicas > 1))


def parameters(spec: TaskSpec) -> int:
    """Estimate the parameters of one worker of the built-in GPT: layers and embedding, cut evenly."""
    m = spec.model
    return (12 * m.layers * m.hidden**2 + m.hidden * (m.vocab + m.seq)) // (spec.tp * spec.pp)


@lru_cache(maxsize=65_536)
def most_sums(micro_batches: int, lanes: int, replicas: int) -> int:
    """Return the sums of the replica that has the most."""
    return max(
        _sums(first, stop, micro_batches, lanes) for first, stop in _stretches(micro_batches, replicas) if first < stop
    )


def _stretches(micro_batches: int, replicas: int) -> Iterator[tuple[int, int]]:
    """Yield each replica's micro-batches, [first, stop): as even as can be."""
    size, rest = divmod(micro_batches, replicas)
    stop = 0
    for replica in range(replicas):
        first, stop = stop, stop + size + (replica < rest)
        yield first, stop


def _sums(first: int, stop: int, micro_batches: int, lanes: int) -> int:
    """Return the sums of the replica that computes [first, stop)."""
    head, tail = (((index + 1) * lanes - 1) // micro_batches for index in (first, stop - 1))
    shares_head = head * micro_batches // lanes < first
    shares_tail = (tail + 1) * micro_batches // lanes > stop
    if head == tail:
        return 1
    return shares_head + shares_tail + _standing(head + shares_head, tail + 1 - shares_tail)


def _standing(first: int, stop: int) -> int:
    """Return how many sums at a time a replica has that computes the lanes [first, stop) in their order and adds them
    up by the tree: the lane that is computed, and the blocks before it."""
    most = 0
    sizes: list[int] = []
    for lane in range(first, stop):
        most = max(most, len(sizes) + 1)
        sizes.append(1)
        while len(sizes) > 1 and sizes[-1] == sizes[-2] and (lane + 1) % (2 * sizes[-1]) == 0:
            sizes.append(sizes.pop() + sizes.pop())
    return most
