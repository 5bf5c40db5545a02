"""Which member holds which part of the sharded optimizer state, as one member knows it. Pure; see `parts.py`."""

from __future__ import annotations

from collections.abc import Sequence

from agents.protocol.messages import Membership
from agents.trainer.sharded.parts import Move, Part, Span, covers, givers, moves, placed


class Shares:
    """One shard's. `extents`: elements of its spaces. `layout`: the spans that each member of the present group holds,
    in rank order."""

    def __init__(self, extents: Sequence[int]) -> None:
        self.extents = list(extents)
        self.total = sum(extents)
        self.layout: list[Sequence[Span]] = []

    def are_whole(self, layout: Sequence[Sequence[Span]]) -> bool:
        """Whether these members together hold everything."""
        return covers(layout, self.total)

    def layout_of(self, cut: Sequence[Sequence[Part]]) -> list[Sequence[Span]]:
        """The spans of each member's parts."""
        return [[span for part in parts for span in part.spans(self.extents) if span[0] < span[1]] for parts in cut]

    def gathering(self) -> list[Move]:
        """Which member gives what to all after a step; `target` is meaningless. Raises NowhereHeld."""
        return givers(self.layout, self.total)

    def dividing(self, cut: Sequence[Sequence[Part]]) -> list[Move]:
        """What has to travel so that each member holds its parts of the cut. Raises NowhereHeld."""
        return moves(self.layout, self.layout_of(cut))

    def assembling(self) -> list[Move]:
        """What has to travel so that the first member has everything. Raises NowhereHeld."""
        return moves(self.layout, [[(0, self.total)], *([] for _ in self.layout[1:])])


def cut(nodes: Sequence[frozenset[str]], staying: Sequence[int] | None = None) -> list[list[Part]]:
    """The parts that each member is to hold. `nodes[r]`: where replica r stands; `staying`: the ranks that hold any,
    None: all."""
    ranks = range(len(nodes)) if staying is None else staying
    found: list[list[Part]] = [[] for _ in nodes]
    for rank, indices in zip(ranks, placed([nodes[rank] for rank in ranks]), strict=True):
        found[rank] = [Part(len(ranks), index) for index in indices]
    return found


def nodes_of(membership: Membership) -> list[frozenset[str]]:
    """The nodes that each replica stands on, in rank order."""
    found: dict[int, set[str]] = {}
    for member in membership.members:
        found.setdefault(member.replica, set()).add(member.node)
    return [frozenset(nodes) for nodes in found.values()]
