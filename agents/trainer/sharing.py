"""The sharded optimizer's tensors on their way between replicas.

Rules
-----
* `gather`, after each step: every stretch of the parameters from a replica that has stepped it, to all others. A group
  that breaks in the middle has harmed nothing: what has arrived is what would have arrived, and the next group gathers
  again, from whoever holds the parts then.
* `divide`, in each new group: the parts are cut anew for its number of replicas, and every replica gets those that it
  is to hold and has not. They are staged, all say so, and only then (`adopt`) is dropped what was held before: whoever
  has heard from all knows that all have theirs, and whoever has not still has both. No step happens in between.
* `assemble`, for a capture: the whole state, at the first replica, in memory of the CPU.
* All are collectives of the group, in the same order everywhere, and row by row, which bounds the memory they take.

What does not live here: when they happen and what follows a fault (`hook.py`), who holds what (`parts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from agents.trainer.group import Group
from agents.trainer.parts import Move, Part, Span, covers, givers, moves, placed
from agents.trainer.sharded_optimizer import Held, Row, Rows, ShardedOptimizer


class Sharing:
    """One shard's. `layout`: the spans that each member of the present group holds, in rank order."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self.layout: list[Sequence[Span]] = []
        self.total = sum(optimizer.extents)

    def is_whole_in(self, layout: Sequence[Sequence[Span]]) -> bool:
        """Whether the members together hold everything."""
        return covers(layout, self.total)

    def gather(self, group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Start giving the stepped parameters to all; `Group.finish` it, and `land` what is returned. Raises
        NowhereHeld."""
        arriving = []
        for move in givers(self.layout, self.total):
            place = self.optimizer.bytes_at(move.start, move.stop)
            if place.device.type == group.device.type:
                group.broadcast(place, move.source)
            else:  # gloo between GPUs
                arriving.append((place, place.to(group.device)))
                group.broadcast(arriving[-1][1], move.source)
        return arriving

    def land(self, arrived: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put what travelled on another device into its place."""
        for place, data in arrived:
            place.copy_(data)

    def cut(self, nodes: Sequence[frozenset[str]], staying: Sequence[int] | None = None) -> list[list[Part]]:
        """The parts that each member is to hold. `nodes[r]`: where replica r stands; `staying`: who holds any, None:
        all."""
        ranks = range(len(nodes)) if staying is None else staying
        found: list[list[Part]] = [[] for _ in nodes]
        for rank, indices in zip(ranks, placed([nodes[rank] for rank in ranks]), strict=True):
            found[rank] = [Part(len(ranks), index) for index in indices]
        return found

    def begin(self, group: Group, cut: Sequence[Sequence[Part]]) -> None:
        """Nobody has trained yet: stage this member's parts, made from its parameters."""
        self.optimizer.stage([self.optimizer.first(part) for part in cut[group.rank]])

    def divide(self, group: Group, cut: Sequence[Sequence[Part]]) -> int:
        """Stage this member's parts, from wherever they are held; the bytes received. Raises what `Group.finish` and
        `moves` raise."""
        wanted = self._layout(cut)
        arrived = [Held(part, self._empty(part)) for part in cut[group.rank]]
        received_bytes = 0
        for row, pieces in self._exchange(group, wanted):
            extent = self.optimizer.spaces[row[0]].extent
            for held in arrived:
                here, there = held.part.within(extent)
                for start, stop, piece in (*self._own(row, here, there), *pieces):
                    _lay(held.rows[row], here, there, start, stop, piece)
            received_bytes += sum(piece.nbytes for _, _, piece in pieces)
        self.optimizer.stage(arrived)
        return received_bytes

    def adopt(self, cut: Sequence[Sequence[Part]]) -> None:
        """All have theirs."""
        self.optimizer.adopt()
        self.layout = self._layout(cut)

    def alone(self) -> Rows | None:
        """All rows, whole, if this replica holds everything, copied."""
        if not covers([self.optimizer.spans()], self.total):
            return None
        whole: Rows = {}
        for row in self.optimizer.rows:
            extent = self.optimizer.spaces[row[0]].extent
            whole[row] = torch.zeros(extent)
            for start, stop, piece in self._own(row, 0, extent):
                _lay(whole[row], 0, extent, start, stop, piece)
        return whole

    def assemble(self, group: Group) -> Rows | None:
        """All rows, whole, at rank 0; None elsewhere. Raises what `Group.finish` raises."""
        wanted: list[Sequence[Span]] = [[] for _ in range(group.size)]
        wanted[0] = [(0, self.total)]
        whole: Rows = {}
        for row, pieces in self._exchange(group, wanted):
            if group.rank == 0:
                extent = self.optimizer.spaces[row[0]].extent
                whole[row] = torch.zeros(extent)
                for start, stop, piece in (*self._own(row, 0, extent), *pieces):
                    _lay(whole[row], 0, extent, start, stop, piece)
        return whole if group.rank == 0 else None

    # --- inside -----------------------------------------------------------------------------------

    def _layout(self, cut: Sequence[Sequence[Part]]) -> list[Sequence[Span]]:
        extents = self.optimizer.extents
        return [[span for part in parts for span in part.spans(extents) if span[0] < span[1]] for parts in cut]

    def _empty(self, part: Part) -> Rows:
        rows: Rows = {}
        for row in self.optimizer.rows:
            space = self.optimizer.spaces[row[0]]
            start, stop = part.within(space.extent)
            rows[row] = torch.zeros(stop - start, device=space.data.device)
        return rows

    def _own(self, row: Row, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """What is held here of a stretch of a row."""
        base = sum(self.optimizer.extents[: row[0]])
        for here, there in self.optimizer.spans():
            first, last = max(here - base, start), min(there - base, stop)
            if first < last:
                yield first, last, self.optimizer.read(row, first, last)

    def _exchange(
        self, group: Group, wanted: Sequence[Sequence[Span]]
    ) -> Iterator[tuple[Row, list[tuple[int, int, torch.Tensor]]]]:
        """Row by row, the pieces that this member wanted and did not hold: start and stop within the space."""
        travelling = moves(self.layout, wanted)
        for row in self.optimizer.rows:
            base = sum(self.optimizer.extents[: row[0]])
            end = base + self.optimizer.extents[row[0]]
            mine = [move for move in travelling if base <= move.start and move.stop <= end]
            yield row, self._travel(group, row, base, mine) if mine else []

    def _travel(self, group: Group, row: Row, base: int, travelling: list[Move]) -> list[tuple[int, int, torch.Tensor]]:
        leaving = sorted((move for move in travelling if move.source == group.rank), key=lambda move: move.target)
        coming = sorted((move for move in travelling if move.target == group.rank), key=lambda move: move.source)
        out = [self.optimizer.read(row, move.start - base, move.stop - base).to(group.device) for move in leaving]
        given = torch.cat(out) if out else torch.empty(0, device=group.device)
        taken = torch.empty(sum(move.size for move in coming), device=group.device)
        group.all_to_all(
            taken,
            given,
            [sum(move.size for move in coming if move.source == member) for member in range(group.size)],
            [sum(move.size for move in leaving if move.target == member) for member in range(group.size)],
        )
        group.finish()
        pieces = taken.split([move.size for move in coming])
        return [(move.start - base, move.stop - base, piece) for move, piece in zip(coming, pieces, strict=True)]


def _lay(target: torch.Tensor, here: int, there: int, start: int, stop: int, piece: torch.Tensor) -> None:
    """Copy what `piece` [start, stop) has of `target` [here, there)."""
    first, last = max(here, start), min(there, stop)
    if first < last:
        target[first - here : last - here].copy_(piece[first - start : last - start])
