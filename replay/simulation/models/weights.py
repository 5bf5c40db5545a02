"""A replica's parameters and its optimizer's state, modelled: blocks of ALIGN elements, each a chain of hashes.

A block's value after a step follows from the value before, the iteration and the gradient. So the order and the number
of steps count, and a block that was left out, stepped twice or mixed up stays visible. Without sharded optimizer state
there is one block, and the optimizer's state is the parameters'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from unicrond.agents.trainer.lifecycle.optimizer_shards import ALIGN, Span, SpanMove, StatePart

Blocks: TypeAlias = tuple[int, ...]
#: Elements of the two spaces of a sharded optimizer. (Of some numbers of parts the last ones are empty.)
EXTENTS = (4 * ALIGN, 3 * ALIGN)


class WeightsState(NamedTuple):
    """The saved state of an iteration: the parameters, and, where that is sharded, the optimizer's whole state."""

    params: Blocks
    optimizer: Blocks = ()


def initial_params(*, sharded: bool) -> Blocks:
    """Return the parameters of the seed."""
    return tuple(range(sum(EXTENTS) // ALIGN)) if sharded else (0,)


def step_block(value: int, iteration: int, gradient: int) -> int:
    """Return a block after one more step."""
    return hash((value, iteration, gradient))


class Weights:
    """One replica's parameters and optimizer state. `whole`: the optimizer's state as it was assembled for saving."""

    def __init__(self, *, sharded: bool) -> None:
        self.sharded = sharded
        self.params = initial_params(sharded=sharded)
        self.whole: Blocks | None = None
        self._parts: dict[StatePart, dict[int, int]] = {}
        self._staged: dict[StatePart, dict[int, int]] = {}

    def step(self, iteration: int, gradient: int) -> None:
        """Step everything, or the parts that are present. Raises RuntimeError where nothing may be stepped."""
        if not self.sharded:
            self.params = tuple(step_block(value, iteration, gradient) for value in self.params)
            return
        if self._staged or not self._parts:
            raise RuntimeError(f"iteration {iteration}: stepped while parts are on their way")
        params = list(self.params)
        for blocks in self._parts.values():
            for block, value in blocks.items():
                blocks[block] = params[block] = step_block(value, iteration, gradient)
        self.params = tuple(params)

    # --- what others give -------------------------------------------------------------------------

    def take_gathered(self, rows: Sequence[Sequence[int]], moves: Iterable[SpanMove]) -> None:
        """Take from all members' parameters the blocks that the moves name."""
        params = list(self.params)
        for move in moves:
            for block in _blocks((move.start, move.stop)):
                params[block] = rows[move.source][block]
        self.params = tuple(params)

    def row(self) -> list[int]:
        """Return all present blocks for the other members: for each block whether it is present, and its value."""
        blocks = self._all_blocks()
        return [word for block in range(len(self.params)) for word in (int(block in blocks), blocks.get(block, 0))]

    def stage(
        self, parts: Sequence[StatePart], rows: Sequence[Sequence[int]], moves: Iterable[SpanMove], rank: int
    ) -> None:
        """Stage these parts, from the blocks here and from the members' rows. Raises KeyError where a block is
        missing."""
        blocks = self._all_blocks()
        for move in moves:
            if move.target == rank:
                for block in _blocks((move.start, move.stop)):
                    if not rows[move.source][2 * block]:
                        raise KeyError(f"member {move.source} is to give block {block}, which it does not hold")
                    blocks[block] = rows[move.source][2 * block + 1]
        self._staged = {part: {block: blocks[block] for block in _of(part)} for part in parts}

    # --- what is held -----------------------------------------------------------------------------

    def stage_first(self, parts: Sequence[StatePart]) -> None:
        """Stage these parts with the values of the parameters."""
        self._staged = {part: {block: self.params[block] for block in _of(part)} for part in parts}

    def adopt(self) -> None:
        """Replace the present parts by the staged ones."""
        self._parts, self._staged = self._staged, {}

    def forget(self) -> None:
        """Drop all parts."""
        self._parts, self._staged = {}, {}

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of all parts, staged or not."""
        spans = {span for part in (*self._parts, *self._staged) for span in part.spans(EXTENTS)}
        return tuple(sorted(span for span in spans if span[0] < span[1]))

    def active_blocks(self) -> dict[int, int]:
        """Return the blocks that will be stepped next."""
        return {block: value for blocks in self._parts.values() for block, value in blocks.items()}

    def assemble(self, rows: Sequence[Sequence[int]], moves: Iterable[SpanMove]) -> None:
        """Assemble the whole optimizer state."""
        assembly = Weights(sharded=True)
        assembly._parts = {StatePart(1, 0): self._all_blocks()}
        assembly.stage([StatePart(1, 0)], rows, moves, 0)
        self.whole = tuple(value for _, value in sorted(assembly._staged[StatePart(1, 0)].items()))

    # --- states -----------------------------------------------------------------------------------

    def state_to_save(self) -> WeightsState:
        """Return the state to write. Raises KeyError where only parts are here."""
        if not self.sharded:
            return WeightsState(self.params)
        blocks = self._all_blocks()
        whole = self.whole or tuple(blocks[block] for block in range(len(self.params)))
        return WeightsState(self.params, whole)

    def restore(self, state: WeightsState) -> None:
        """Take over a saved state."""
        self.receive(state.params)
        if self.sharded:
            self._staged = {StatePart(1, 0): dict(enumerate(state.optimizer))}

    def receive(self, params: Blocks) -> None:
        """Take over another member's parameters."""
        self.params = params
        self.forget()

    def _all_blocks(self) -> dict[int, int]:
        every = (*self._parts.values(), *self._staged.values())
        return {block: value for blocks in every for block, value in blocks.items()}


def _blocks(span: Span) -> range:
    return range(span[0] // ALIGN, -(-span[1] // ALIGN))


def _of(part: StatePart) -> Iterator[int]:
    for span in part.spans(EXTENTS):
        yield from _blocks(span)
