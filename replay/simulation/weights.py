"""A replica's parameters and its optimizer's state, modelled: blocks of ALIGN elements, each a chain of hashes.

A block's value after a step follows from the value before, the iteration and the gradient. So the order and the number
of steps count, and a block that was left out, stepped twice or mixed up stays visible. Without sharded optimizer state
there is one block, and the optimizer's state is the parameters'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from agents.trainer.sharded.parts import ALIGN, Move, Part, Span

Blocks: TypeAlias = tuple[int, ...]
#: Elements of the two spaces of a sharded optimizer. (Of some numbers of parts the last ones are empty.)
EXTENTS = (4 * ALIGN, 3 * ALIGN)


class State(NamedTuple):
    """What is saved of an iteration: the parameters, and, where that is sharded, the optimizer's whole state."""

    params: Blocks
    optimizer: Blocks = ()


def first(*, sharded: bool) -> Blocks:
    """The parameters of the seed."""
    return tuple(range(sum(EXTENTS) // ALIGN)) if sharded else (0,)


def stepped(value: int, iteration: int, gradient: int) -> int:
    """A block after one more step."""
    return hash((value, iteration, gradient))


class Weights:
    """One replica's. `whole`: the optimizer's state as it was assembled for saving."""

    def __init__(self, *, sharded: bool) -> None:
        self.sharded = sharded
        self.params = first(sharded=sharded)
        self.whole: Blocks | None = None
        self._held: dict[Part, dict[int, int]] = {}
        self._staged: dict[Part, dict[int, int]] = {}

    def step(self, iteration: int, gradient: int) -> None:
        """Step everything, or the parts that are held. Raises RuntimeError where nothing may be stepped."""
        if not self.sharded:
            self.params = tuple(stepped(value, iteration, gradient) for value in self.params)
            return
        if self._staged or not self._held:
            raise RuntimeError(f"iteration {iteration}: stepped while parts are on their way")
        params = list(self.params)
        for blocks in self._held.values():
            for block, value in blocks.items():
                blocks[block] = params[block] = stepped(value, iteration, gradient)
        self.params = tuple(params)

    # --- what others give -------------------------------------------------------------------------

    def gathered(self, rows: Sequence[Sequence[int]], moves: Iterable[Move]) -> None:
        """The parameters of all members have come: take what the moves say."""
        params = list(self.params)
        for move in moves:
            for block in _blocks((move.start, move.stop)):
                params[block] = rows[move.source][block]
        self.params = tuple(params)

    def row(self) -> list[int]:
        """All that is held, as others see it: for each block whether it is, and its value."""
        held = self._all_held()
        return [word for block in range(len(self.params)) for word in (int(block in held), held.get(block, 0))]

    def stage(self, parts: Sequence[Part], rows: Sequence[Sequence[int]], moves: Iterable[Move], rank: int) -> None:
        """These parts, from what is held here and from the members' rows. Raises KeyError where a block is missing."""
        found = self._all_held()
        for move in moves:
            if move.target == rank:
                for block in _blocks((move.start, move.stop)):
                    if not rows[move.source][2 * block]:
                        raise KeyError(f"member {move.source} is to give block {block}, which it does not hold")
                    found[block] = rows[move.source][2 * block + 1]
        self._staged = {part: {block: found[block] for block in _of(part)} for part in parts}

    # --- what is held -----------------------------------------------------------------------------

    def stage_first(self, parts: Sequence[Part]) -> None:
        """These parts, as the parameters are."""
        self._staged = {part: {block: self.params[block] for block in _of(part)} for part in parts}

    def adopt(self) -> None:
        """Hold what is staged, and nothing else."""
        self._held, self._staged = self._staged, {}

    def forget(self) -> None:
        """Drop all parts."""
        self._held, self._staged = {}, {}

    def spans(self) -> tuple[Span, ...]:
        """Of all that is held, staged or not."""
        spans = {span for part in (*self._held, *self._staged) for span in part.spans(EXTENTS)}
        return tuple(sorted(span for span in spans if span[0] < span[1]))

    def held(self) -> dict[int, int]:
        """The blocks that will be stepped next."""
        return {block: value for blocks in self._held.values() for block, value in blocks.items()}

    def assembled(self, rows: Sequence[Sequence[int]], moves: Iterable[Move]) -> None:
        """The whole optimizer state is here."""
        here = Weights(sharded=True)
        here._held = {Part(1, 0): self._all_held()}
        here.stage([Part(1, 0)], rows, moves, 0)
        self.whole = tuple(value for _, value in sorted(here._staged[Part(1, 0)].items()))

    # --- states -----------------------------------------------------------------------------------

    def saved(self) -> State:
        """What is written. Raises KeyError where only parts are here."""
        if not self.sharded:
            return State(self.params)
        held = self._all_held()
        whole = self.whole or tuple(held[block] for block in range(len(self.params)))
        return State(self.params, whole)

    def restore(self, state: State) -> None:
        """Live in a saved state."""
        self.receive(state.params)
        if self.sharded:
            self._staged = {Part(1, 0): dict(enumerate(state.optimizer))}

    def receive(self, params: Blocks) -> None:
        """Another member's parameters."""
        self.params = params
        self.forget()

    def _all_held(self) -> dict[int, int]:
        every = (*self._held.values(), *self._staged.values())
        return {block: value for blocks in every for block, value in blocks.items()}


def _blocks(span: Span) -> range:
    return range(span[0] // ALIGN, -(-span[1] // ALIGN))


def _of(part: Part) -> Iterator[int]:
    for span in part.spans(EXTENTS):
        yield from _blocks(span)
