"""Divides the optimizer's state into parts, assigns each to several replicas, and finds the holders when replicas come
or go.

Rules
-----
* All parameters of a shard stand one after the other in flat spaces, one for each dtype; a *span* is a stretch of them,
  [start, stop), counted through all spaces. Part `index` of `count` is one span in each space, as Megatron's
  distributed optimizer divides them; spans begin at multiples of ALIGN elements of every parameter, so that
  vectorized arithmetic treats each element alike, however many parts there are.
* A group of n replicas has n parts. Replica r *owns* part r, and each part has a second holder, which makes the same
  steps with it: with equal sums equal steps follow, so the second copy is never older than the first and costs no
  traffic. One replica alone has everything, and no second holder.
* The second holder of part r is replica r + k, around the ring; k is the smallest shift that takes every part to other
  nodes. Where none does, the shift that fails for the fewest parts, and each of those goes to the nearest replica on
  other nodes, if there is any.
* What a member wants and does not have comes from the holder that has given least so far.

Pure: nodes and spans come in, spans and moves go out. What does not live here: the tensors
(`optimizer.py`) and how they travel (`sharing.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

#: [start, stop), in elements.
Span: TypeAlias = tuple[int, int]
ALIGN = 64


class NoHolder(Exception):
    """No remaining member holds a span of the state: all holders of a part are lost."""


@dataclass(frozen=True, slots=True, order=True)
class StatePart:
    """One of `count` equal parts of the optimizer's state."""

    count: int
    index: int

    def size(self, extent: int) -> int:
        """Return the elements of every part of a space of `extent` elements; the last parts end with the space."""
        return -(-extent // (ALIGN * self.count)) * ALIGN

    def within(self, extent: int) -> Span:
        """Return its span of one space."""
        size = self.size(extent)
        return min(self.index * size, extent), min((self.index + 1) * size, extent)

    def spans(self, extents: Sequence[int]) -> list[Span]:
        """Return its span of each space, counted through all of them; empty ones as well."""
        spans, base = [], 0
        for extent in extents:
            start, stop = self.within(extent)
            spans.append((base + start, base + stop))
            base += extent
        return spans


@dataclass(frozen=True, slots=True)
class SpanMove:
    """A transfer of a span of the state from member `source` to member `target`."""

    start: int
    stop: int
    source: int
    target: int

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


def assign_holders(nodes: Sequence[frozenset[str]]) -> list[tuple[int, ...]]:
    """Return the indices of the parts that each replica holds, its own first. `nodes[r]`: the nodes replica r is on."""
    count = len(nodes)
    holders = [[replica] for replica in range(count)]
    if count > 1:
        shift, near = _shift(nodes)
        for part in range(count):
            if part in near:
                distant_steps = (step for step in range(1, count) if not nodes[part] & nodes[(part + step) % count])
                holders[(part + next(distant_steps, shift)) % count].append(part)
            else:
                holders[(part + shift) % count].append(part)
    return [tuple(parts) for parts in holders]


def _shift(nodes: Sequence[frozenset[str]]) -> tuple[int, frozenset[int]]:
    """Return the ring's shift, and the parts that it leaves on a node of their own."""
    count, best = len(nodes), (0, frozenset(range(len(nodes))))
    for shift in range(1, count):
        near = frozenset(part for part in range(count) if nodes[part] & nodes[(part + shift) % count])
        if not best[0] or len(near) < len(best[1]):
            best = shift, near
        if not near:
            break
    return best


def covers(spans_by_member: Iterable[Sequence[Span]], total: int) -> bool:
    """Return whether the members together hold all `total` elements."""
    reached = 0
    for start, stop in sorted(span for spans in spans_by_member for span in spans):
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached >= total


def gather_moves(spans_by_member: Sequence[Sequence[Span]], total: int) -> list[SpanMove]:
    """Return which member gives what to all, so that each has everything; `target` is meaningless. Raises NoHolder."""
    return _divided(spans_by_member, [(0, 0, total)])


def moves(current: Sequence[Sequence[Span]], targets: Sequence[Sequence[Span]]) -> list[SpanMove]:
    """Return what has to travel so that each member has its `targets`, by target and start. Raises NoHolder."""
    missing = [
        (rank, start, stop) for rank, spans in enumerate(targets) for span in spans
        for start, stop in _without(span, current[rank])
    ]  # fmt: skip
    return _divided(current, missing)


def _divided(spans_by_member: Sequence[Sequence[Span]], missing: Sequence[tuple[int, int, int]]) -> list[SpanMove]:
    """Return moves for each missing (target, start, stop), cut where the holders change. Raises NoHolder."""
    cuts = sorted({cut for spans in spans_by_member for span in spans for cut in span})
    holders_from = _holders(spans_by_member, cuts)
    loads = [0] * len(spans_by_member)
    moves = []
    for target, start, stop in missing:
        edges = [start, *cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)], stop]
        for begin, end in pairwise(edges):
            if begin == end:
                continue
            between = bisect_right(cuts, begin)
            holders = holders_from[cuts[between - 1]] if 0 < between < len(cuts) else ()
            if not holders:
                raise NoHolder(f"no member holds elements {begin} to {end}")
            source = min(holders, key=lambda member: (loads[member], member))
            loads[source] += end - begin
            moves.append(SpanMove(begin, end, source, target))
    return moves


def _holders(spans_by_member: Sequence[Sequence[Span]], cuts: Sequence[int]) -> dict[int, list[int]]:
    """Return, for each cut, the members that hold everything from it to the next."""
    holders: dict[int, list[int]] = {cut: [] for cut in cuts}
    for member, spans in enumerate(spans_by_member):
        for start, stop in spans:
            for cut in cuts[bisect_left(cuts, start) : bisect_left(cuts, stop)]:
                holders[cut].append(member)
    return holders


def _without(span: Span, spans: Sequence[Span]) -> list[Span]:
    """Return what of the span no other span has."""
    gaps, (start, stop) = [], span
    for begin, end in sorted(spans):
        if begin >= stop or end <= start:
            continue
        if begin > start:
            gaps.append((start, begin))
        start = max(start, end)
    if start < stop:
        gaps.append((start, stop))
    return gaps
