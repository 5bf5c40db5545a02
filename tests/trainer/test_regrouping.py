"""The verdict, and a model of training in which any member may die at any moment: every iteration is committed by all
who live, each micro-batch exactly once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.trainer.dealing import deal
from agents.trainer.regrouping import Position, PositionsContradict, judge

positions = st.builds(
    Position,
    has_state=st.booleans(),
    iteration=st.integers(0, 2**40),
    sums_complete=st.booleans(),
    held=st.sets(st.integers(0, 199)).map(lambda held: tuple(sorted(held))),
    complete=st.sets(st.integers(0, 99)).map(lambda complete: tuple(sorted(complete))),
)


@given(positions)
def test_rows_carry_positions(position: Position) -> None:
    row = position.row(200, 100)
    assert len(row) == len(Position(False, 0, False, ()).row(200, 100))
    assert all(-(2**63) <= value < 2**63 for value in row)
    assert Position.from_row(row, 200) == position


def at(iteration: int, held: tuple[int, ...] = (), sums: bool = False) -> Position:
    return Position(has_state=True, iteration=iteration, sums_complete=sums, held=held)


JOINER = Position(has_state=False, iteration=0, sums_complete=False, held=())


def test_incomplete_sums_are_thrown_away_and_the_lost_work_is_dealt() -> None:
    verdict = judge([at(7, (0, 3), sums=True), at(7, (1, 4))], 6)
    assert (verdict.iteration, verdict.step_first, verdict.dealt) == (7, frozenset(), ((2,), (5,)))


def test_complete_sums_everywhere_step_first() -> None:
    verdict = judge([at(7, (0, 3), sums=True), at(7, (1, 4), sums=True)], 6)
    assert (verdict.iteration, verdict.step_first, verdict.dealt) == (8, frozenset({0, 1}), ((0, 2, 4), (1, 3, 5)))


def test_who_is_behind_a_commit_steps_first() -> None:
    verdict = judge([at(7, (0, 2), sums=True), at(8, (1, 3))], 6)
    assert (verdict.iteration, verdict.step_first) == (8, frozenset({0}))
    assert verdict.dealt == ((0, 2, 4), (5,))


def test_joiners_receive_from_the_lowest_with_state() -> None:
    verdict = judge([JOINER, at(7), at(7)], 6)
    assert (verdict.source, verdict.receivers, verdict.fresh) == (1, frozenset({0}), False)
    assert verdict.dealt == ((0, 3), (1, 4), (2, 5))


def test_nobody_has_state() -> None:
    verdict = judge([JOINER, JOINER], 4)
    assert (verdict.source, verdict.receivers, verdict.fresh) == (0, frozenset({0, 1}), True)


@pytest.mark.parametrize("behind", [at(7, (0,)), at(6, (0,), sums=True)])
def test_positions_that_no_training_leads_to(behind: Position) -> None:
    with pytest.raises(PositionsContradict):
        judge([behind, at(8)], 6)


@dataclass
class Member:
    """A member of the model: `stage` counts how far it is in its iteration (see Model.advance)."""

    iteration: int = 1
    held: tuple[int, ...] = ()
    sums: bool = False
    entered: bool = False
    agreed: bool = False
    contributions: dict[int, tuple[int, ...]] = field(default_factory=dict)


class Model:
    """Members that advance one small step at a time, in any order, under the rules of the real hook's collectives:
    sums are complete for one only if all have entered with all work done, likewise the agreement."""

    def __init__(self, draw: random.Random, members: int, micro_batches: int) -> None:
        self.draw, self.micro_batches = draw, micro_batches
        hands = deal([()] * members, micro_batches)
        self.members = [Member(held=hand) for hand in hands]
        self.group = list(self.members)
        self.committed: dict[int, set[tuple[tuple[int, ...], ...]]] = {}

    def advance(self, member: Member) -> None:
        """Reduce (all in the group have entered the same iteration, or moved on), agree, or commit."""
        if member.agreed:
            self.commit(member)
        elif not member.sums:
            if all(other.iteration == member.iteration for other in self.group if other in self.members):
                lost = [other for other in self.group if other not in self.members]
                if not lost:
                    member.sums = True
                    member.contributions[member.iteration] = ()
        elif not member.entered:
            member.entered = True
        elif all(other.entered or other.iteration > member.iteration for other in self.group):
            member.agreed = True

    def commit(self, member: Member) -> None:
        member.iteration += 1
        member.sums = member.entered = member.agreed = False
        member.held = deal([()] * len(self.group), self.micro_batches)[self.group.index(member)]

    def die(self, member: Member) -> None:
        self.members.remove(member)

    def regroup(self) -> None:
        for member in self.members:
            if member.agreed:  # the optimizer's step is not interrupted
                self.commit(member)
        told = [Position(True, m.iteration, m.sums, m.held) for m in self.members]
        verdict = judge(told, self.micro_batches)
        self.group = list(self.members)
        for rank, member in enumerate(self.members):
            hand = verdict.dealt[rank]
            if rank in verdict.step_first:
                assert member.sums, "it steps with sums that it does not have"
                member.iteration, member.held = verdict.iteration, hand
            else:
                assert member.iteration == verdict.iteration
                member.held += hand
            member.sums = member.entered = member.agreed = False
        assert sorted(m for member in self.members for m in member.held) == list(range(self.micro_batches))


@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 14))
def test_whoever_dies_whenever_the_survivors_agree(seed: int, members: int, micro_batches: int) -> None:
    draw = random.Random(seed)
    model = Model(draw, members, micro_batches)
    for _ in range(draw.randrange(60)):
        model.advance(draw.choice(model.members))
        if len(model.members) > 1 and draw.random() < 0.1:
            model.die(draw.choice(model.members))
            for _ in range(draw.randrange(6)):  # some go on for a while before they notice
                model.advance(draw.choice(model.members))
            model.regroup()
