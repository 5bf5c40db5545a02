"""The distribution of sharded optimizer state over the members of a group, as one member knows it. Pure; see
`optimizer_shards.py`."""

from __future__ import annotations

from collections.abc import Sequence

from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.trainer.lifecycle.optimizer_shards import (
    Span,
    SpanMove,
    StatePart,
    assign_holders,
    covers,
    gather_moves,
    moves,
)


class Shares:
    """The spans that each member holds of one shard's optimizer state. `extents`: elements of its spaces. `layout`: the
    spans of each member of the present group, in rank order."""

    def __init__(self, extents: Sequence[int]) -> None:
        self.extents = list(extents)
        self.total = sum(extents)
        self.layout: list[Sequence[Span]] = []

    def are_whole(self, layout: Sequence[Sequence[Span]]) -> bool:
        """Return whether these members together hold everything."""
        return covers(layout, self.total)

    def layout_of(self, parts_by_rank: Sequence[Sequence[StatePart]]) -> list[Sequence[Span]]:
        """Return the spans of each member's parts."""
        return [
            [span for part in member_parts for span in part.spans(self.extents) if span[0] < span[1]]
            for member_parts in parts_by_rank
        ]

    def gathering(self) -> list[SpanMove]:
        """Return which member gives what to all after a step; `target` is meaningless. Raises NoHolder."""
        return gather_moves(self.layout, self.total)

    def dividing(self, parts_by_rank: Sequence[Sequence[StatePart]]) -> list[SpanMove]:
        """Return what has to travel so that each member holds these parts. Raises NoHolder."""
        return moves(self.layout, self.layout_of(parts_by_rank))

    def assembling(self) -> list[SpanMove]:
        """Return what has to travel so that the first member has everything. Raises NoHolder."""
        return moves(self.layout, [[(0, self.total)], *([] for _ in self.layout[1:])])


def assign_parts(nodes: Sequence[frozenset[str]], staying: Sequence[int] | None = None) -> list[list[StatePart]]:
    """Return the parts that each member is to hold. `nodes[r]`: the nodes of replica r; `staying`: the ranks that hold
    any, None: all."""
    ranks = range(len(nodes)) if staying is None else staying
    parts: list[list[StatePart]] = [[] for _ in nodes]
    for rank, indices in zip(ranks, assign_holders([nodes[rank] for rank in ranks]), strict=True):
        parts[rank] = [StatePart(len(ranks), index) for index in indices]
    return parts


def nodes_of(membership: GroupMembership) -> list[frozenset[str]]:
    """Return the nodes of each replica, in rank order."""
    nodes_by_replica: dict[int, set[str]] = {}
    for member in membership.members:
        nodes_by_replica.setdefault(member.replica, set()).add(member.node)
    return [frozenset(nodes) for nodes in nodes_by_replica.values()]
