"""What the members of a new group do first: they tell their positions, and every one draws the same verdict.

Rules (all-or-none commit)
--------------------------
* A member's *position* is the iteration it works on (last committed + 1), whether its sums of that iteration are
  complete (every bucket and the account of all replicas have been reduced), and what it holds of it.
* Nobody passes the agreement that ends an iteration unless everybody has entered it, and nobody enters it without
  complete sums. So members with state differ by at most one iteration, and if one has committed iteration `i`,
  each one still at `i` has complete sums of it.
* Then those at `i` *step first*, with the sums they have: no recomputation. The group goes on at `i + 1`.
* If nobody has committed `i` but all have complete sums, all step first: after *reduced*, a death changes nothing.
* Else sums are thrown away (they were copies; the accumulation stays), and what nobody holds is dealt anew.
* Who has no state receives it from the lowest member that has, once that one stands at the group's iteration. If
  nobody has state, member 0 takes it from the newest valid checkpoint, or from the seed, and gives it to all.
* Parameters do not change within an iteration, so a receiver may join in the middle of one.

Pure: a function of the rows that the group exchanged. What does not live here: how rows travel (`group.py`), and
who acts on the verdict (`hook.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.trainer.dealing import deal

_WORD_BITS = 62
_FIXED = 3


class PositionsContradict(RuntimeError):
    """The members' positions cannot have come from one training: a defect of ours, never of the cluster."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a member stands. Without state, `iteration` is 0 and it holds nothing."""

    has_state: bool
    iteration: int
    sums_complete: bool
    held: tuple[int, ...]

    def row(self, micro_batches: int) -> list[int]:
        """As signed 64-bit integers: has_state, iteration, sums_complete, then `held` as words of 62 bits."""
        words = [0] * row_words(micro_batches)
        for micro_batch in self.held:
            words[micro_batch // _WORD_BITS] |= 1 << (micro_batch % _WORD_BITS)
        return [int(self.has_state), self.iteration, int(self.sums_complete), *words]

    @staticmethod
    def from_row(row: Sequence[int]) -> Position:
        """The inverse of `row`; `held` comes back in ascending order."""
        held = tuple(
            word * _WORD_BITS + bit
            for word, bits in enumerate(row[_FIXED:])
            for bit in range(_WORD_BITS)
            if bits >> bit & 1
        )
        return Position(has_state=bool(row[0]), iteration=row[1], sums_complete=bool(row[2]), held=held)


def row_words(micro_batches: int) -> int:
    """How many 62-bit words `held` takes in a row."""
    return -(-micro_batches // _WORD_BITS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows for the group.

    `iteration`: where all go on; 0 where nobody has state (the checkpoint tells). `step_first`: members that first
    step with the sums they have. `source`: the member whose state the receivers take. `receivers`: members without
    state. `dealt[m]`: micro-batches of `iteration` newly dealt to member m, on top of what it then holds.
    `fresh`: nobody has state.
    """

    iteration: int
    step_first: frozenset[int]
    source: int
    receivers: frozenset[int]
    dealt: tuple[tuple[int, ...], ...]
    fresh: bool


def judge(positions: Sequence[Position], micro_batches: int) -> Verdict:
    """The verdict on the members' positions, in rank order."""
    with_state = [member for member, position in enumerate(positions) if position.has_state]
    receivers = frozenset(range(len(positions))).difference(with_state)
    if not with_state:
        nothing: list[tuple[int, ...]] = [()] * len(positions)
        return Verdict(
            iteration=0,
            step_first=frozenset(),
            source=0,
            receivers=receivers,
            dealt=deal(nothing, micro_batches),
            fresh=True,
        )
    top = max(positions[member].iteration for member in with_state)
    behind = frozenset(member for member in with_state if positions[member].iteration < top)
    for member in behind:
        if positions[member].iteration < top - 1 or not positions[member].sums_complete:
            raise PositionsContradict(f"member {member} cannot follow to iteration {top}: {list(positions)}")
    step_first, iteration = behind, top
    if not behind and all(positions[member].sums_complete for member in with_state):
        step_first, iteration = frozenset(with_state), top + 1
    held = [
        position.held if position.has_state and member not in step_first else ()
        for member, position in enumerate(positions)
    ]
    return Verdict(
        iteration=iteration,
        step_first=step_first,
        source=with_state[0],
        receivers=receivers,
        dealt=deal(held, micro_batches),
        fresh=False,
    )
