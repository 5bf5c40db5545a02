"""Transfers the sharded optimizer's tensors between replicas.

Rules
-----
* `gather`, after each step: every stretch of the parameters from a replica that has stepped it, to all others.
* `stage`, in each new group: this replica's new parts, from what it holds and from what others give.
* `assemble`, for a capture: the whole state, at the first replica, in memory of the CPU.
* All are collectives of the group, in the same order everywhere, and row by row, which bounds the memory they take.

What does not live here: when they happen and what follows a fault (`lifecycle/optimizer_state.py`), which member holds
what (`lifecycle/shares.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from unicrond.agents.trainer.groups.group import ShardGroup
from unicrond.agents.trainer.lifecycle.optimizer_shards import SpanMove, StatePart
from unicrond.agents.trainer.sharded.optimizer import Holding, Row, Rows, ShardedOptimizer


class Sharing:
    """Makes one shard's transfers of optimizer state."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer

    def gather(self, group: ShardGroup, travelling: Sequence[SpanMove]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Start giving the stepped parameters to all (`target` is meaningless); `ShardGroup.finish` it, and `land` what
        is returned."""
        arriving = []
        for move in travelling:
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

    def stage_first(self, parts: Sequence[StatePart]) -> None:
        """Stage these parts as training begins, made from the parameters."""
        self.optimizer.stage([self.optimizer.initial(part) for part in parts])

    def stage(self, group: ShardGroup, parts: Sequence[StatePart], travelling: Sequence[SpanMove]) -> int:
        """Stage these parts, from what is held here and from what travels; return the bytes received. Raises what
        `ShardGroup.finish` raises."""
        arrived = [Holding(part, self._empty(part)) for part in parts]
        received_bytes = 0
        for row, pieces in self._exchange(group, travelling):
            extent = self.optimizer.spaces[row[0]].extent
            for holding in arrived:
                begin, end = holding.part.within(extent)
                for start, stop, piece in (*self._local_pieces(row, begin, end), *pieces):
                    _lay(holding.rows[row], begin, end, start, stop, piece)
            received_bytes += sum(piece.nbytes for _, _, piece in pieces)
        self.optimizer.stage(arrived)
        return received_bytes

    def copy_rows(self) -> Rows:
        """Return all rows, whole, copied; this replica holds everything."""
        whole: Rows = {}
        for row in self.optimizer.rows:
            extent = self.optimizer.spaces[row[0]].extent
            whole[row] = torch.zeros(extent)
            for start, stop, piece in self._local_pieces(row, 0, extent):
                _lay(whole[row], 0, extent, start, stop, piece)
        return whole

    def assemble(self, group: ShardGroup, travelling: Sequence[SpanMove]) -> Rows | None:
        """Return all rows, whole, at rank 0; None elsewhere. Raises what `ShardGroup.finish` raises."""
        whole: Rows = {}
        for row, pieces in self._exchange(group, travelling):
            if group.rank == 0:
                extent = self.optimizer.spaces[row[0]].extent
                whole[row] = torch.zeros(extent)
                for start, stop, piece in (*self._local_pieces(row, 0, extent), *pieces):
                    _lay(whole[row], 0, extent, start, stop, piece)
        return whole if group.rank == 0 else None

    # --- inside -----------------------------------------------------------------------------------

    def _empty(self, part: StatePart) -> Rows:
        rows: Rows = {}
        for row in self.optimizer.rows:
            space = self.optimizer.spaces[row[0]]
            start, stop = part.within(space.extent)
            rows[row] = torch.zeros(stop - start, device=space.data.device)
        return rows

    def _local_pieces(self, row: Row, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield what is held here of a stretch of a row."""
        base = sum(self.optimizer.extents[: row[0]])
        for begin, end in self.optimizer.spans():
            first, last = max(begin - base, start), min(end - base, stop)
            if first < last:
                yield first, last, self.optimizer.read(row, first, last)

    def _exchange(
        self, group: ShardGroup, travelling: Sequence[SpanMove]
    ) -> Iterator[tuple[Row, list[tuple[int, int, torch.Tensor]]]]:
        """Yield, row by row, the pieces that travel to this member: start and stop within the space."""
        for row in self.optimizer.rows:
            base = sum(self.optimizer.extents[: row[0]])
            end = base + self.optimizer.extents[row[0]]
            row_moves = [move for move in travelling if base <= move.start and move.stop <= end]
            yield row, self._travel(group, row, base, row_moves) if row_moves else []

    def _travel(
        self, group: ShardGroup, row: Row, base: int, travelling: list[SpanMove]
    ) -> list[tuple[int, int, torch.Tensor]]:
        departures = sorted((move for move in travelling if move.source == group.rank), key=lambda move: move.target)
        arrivals = sorted((move for move in travelling if move.target == group.rank), key=lambda move: move.source)
        out = [self.optimizer.read(row, move.start - base, move.stop - base).to(group.device) for move in departures]
        send_buffer = torch.cat(out) if out else torch.empty(0, device=group.device)
        receive_buffer = torch.empty(sum(move.size for move in arrivals), device=group.device)
        group.all_to_all(
            receive_buffer,
            send_buffer,
            [sum(move.size for move in arrivals if move.source == member) for member in range(group.size)],
            [sum(move.size for move in departures if move.target == member) for member in range(group.size)],
        )
        group.finish()
        pieces = receive_buffer.split([move.size for move in arrivals])
        return [(move.start - base, move.stop - base, piece) for move, piece in zip(arrivals, pieces, strict=True)]


def _lay(target: torch.Tensor, begin: int, end: int, start: int, stop: int, piece: torch.Tensor) -> None:
    """Copy what `piece` [start, stop) has of `target` [here, there)."""
    first, last = max(begin, start), min(end, stop)
    if first < last:
        target[first - begin : last - begin].copy_(piece[first - start : last - start])
