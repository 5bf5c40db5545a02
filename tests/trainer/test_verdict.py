"""The verdict, and a model of training in which any member may die at any moment: every iteration is committed by all
who live, each micro-batch exactly once."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import assign_evenly
from unicrond.agents.trainer.lifecycle.verdict import (
    GroupVerdict,
    Position,
    PositionsContradict,
    judge,
    span_row,
    spans_of,
)

positions = st.builds(
    Position,
    has_state=st.booleans(),
    iteration=st.integers(0, 2**40),
    sums_complete=st.booleans(),
    assignment=st.sets(st.integers(0, 199)).map(lambda held: tuple(sorted(held))),
    complete=st.sets(st.integers(0, 99)).map(lambda complete: tuple(sorted(complete))),
    has_thrown_away=st.booleans(),
)


@given(positions)
def test_position_survives_row_round_trip(position: Position) -> None:
    row = position.row(200, 100)
    assert len(row) == len(Position(False, 0, False, ()).row(200, 100))
    assert all(-(2**63) <= value < 2**63 for value in row)
    assert Position.from_row(row, 200) == position


def at(iteration: int, held: tuple[int, ...] = (), sums: bool = False) -> Position:
    return Position(has_state=True, iteration=iteration, sums_complete=sums, assignment=held)


JOINER = Position(has_state=False, iteration=0, sums_complete=False, assignment=())


def test_incomplete_sums_are_dropped_and_lost_work_dealt() -> None:
    verdict = judge([at(7, (0, 3), sums=True), at(7, (1, 4))], 6)
    assert (verdict.iteration, verdict.step_first, verdict.additions) == (7, frozenset(), ((2,), (5,)))


def test_complete_sums_step_first() -> None:
    verdict = judge([at(7, (0, 3), sums=True), at(7, (1, 4), sums=True)], 6)
    assert (verdict.iteration, verdict.step_first, verdict.additions) == (8, frozenset({0, 1}), ((0, 2, 4), (1, 3, 5)))


def test_member_behind_commit_steps_first() -> None:
    verdict = judge([at(7, (0, 2), sums=True), at(8, (1, 3))], 6)
    assert (verdict.iteration, verdict.step_first) == (8, frozenset({0}))
    assert verdict.additions == ((0, 2, 4), (5,))


def test_repeated_work_is_counted_per_member() -> None:
    """Only where a member goes on with what it holds: all else is its first share of an iteration."""
    assert judge([at(7, (0, 3)), at(7, (1,)), JOINER], 9).repeated == (1, 2, 0)
    assert judge([at(7, (0, 2), sums=True), at(8, (1, 3))], 6).repeated == (0, 1)
    assert judge([at(7, (0, 3), sums=True), at(7, (1, 4), sums=True)], 6).repeated == (0, 0)
    assert not sum(judge([JOINER, JOINER], 4).repeated)


def test_buckets_complete_at_all_members_are_final() -> None:
    one = Position(True, 7, False, (0, 3), complete=(2, 1))
    other = Position(True, 7, True, (1, 4), complete=(2, 1, 0))
    assert judge([one, other], 6).final == {1, 2}
    assert judge([one, other, JOINER], 6).final == frozenset(), "a joiner has no sums"
    assert judge([one, at(7)], 6).final == frozenset()
    assert judge([other, at(8)], 6).final == frozenset(), "the buckets of an iteration that is over"


def test_joiners_receive_from_lowest_member_with_state() -> None:
    verdict = judge([JOINER, at(7), at(7)], 6)
    assert (verdict.source, verdict.receivers, verdict.fresh) == (1, frozenset({0}), False)
    assert verdict.additions == ((0, 3), (1, 4), (2, 5))


def test_joiners_alone_start_from_seed() -> None:
    verdict = judge([JOINER, JOINER], 4)
    assert (verdict.source, verdict.receivers, verdict.fresh) == (0, frozenset({0, 1}), True)


@pytest.mark.parametrize("behind", [at(7, (0,)), at(6, (0,), sums=True)])
def test_verdict_refuses_contradicting_positions(behind: Position) -> None:
    with pytest.raises(PositionsContradict):
        judge([behind, at(8)], 6)


@pytest.mark.parametrize(
    "late", [at(8, (1, 5)), at(7, (1, 5)), at(6, (1, 5), sums=True)], ids=["dealt anew", "committed", "long ago"]
)
def test_late_member_receives_state(late: Position) -> None:
    """It stands last; what it holds has been dealt anew, and counts once."""
    verdict = judge([at(8, (0, 1)), at(8, (2,)), late], 6)
    assert (verdict.iteration, verdict.receivers, verdict.source) == (8, frozenset({2}), 0)
    assert sorted(n for held in ((0, 1), (2,), *verdict.additions) for n in held) == [0, 1, 2, 3, 4, 5]


def test_parts_of_late_member_do_not_count() -> None:
    late = replace(at(7, (1,)), spans=((64, 128),))
    verdict = judge([replace(at(8, (0, 1)), spans=((0, 128),)), late], 4)
    assert verdict.shares == (((0, 128),), ())


# --- lanes ---------------------------------------------------------------------------------------


def having(iteration: int, done: tuple[int, ...], dealt: tuple[int, ...]) -> Position:
    return replace(at(iteration, dealt), in_sums=done)


@given(positions, st.sets(st.integers(0, 199)).map(lambda done: tuple(sorted(done))))
def test_position_row_carries_sums(position: Position, done: tuple[int, ...]) -> None:
    position = replace(position, in_sums=done)
    assert Position.from_row(position.row(200, 100, lanes=True), 200, lanes=True) == position


def test_valid_sums_stay_and_rest_is_dealt() -> None:
    verdict = judge([having(7, (0, 1), (0, 1, 2, 3)), having(7, (4, 5, 6, 7), (4, 5, 6, 7))], 12, lanes=Lanes(12, 3))
    assert (
        verdict.lane_assignment is not None
        and verdict.valid_sums(0) == {0, 1}
        and verdict.valid_sums(1) == {4, 5, 6, 7}
    )
    assert verdict.additions == ((8, 9, 2, 3), (10, 11))
    assert verdict.repeated == (2, 2), "what was another's; 2 and 3 were its own"


def test_longer_running_sum_wins() -> None:
    verdict = judge([having(7, (2,), (0, 1, 2)), having(7, (2, 3), (3, 4, 5))], 6, lanes=Lanes(6, 3))
    assert (verdict.valid_sums(0), verdict.valid_sums(1)) == (frozenset(), {2, 3})
    assert sorted(
        (*verdict.valid_sums(0), *verdict.valid_sums(1), *verdict.additions[0], *verdict.additions[1])
    ) == list(range(6))


def test_late_member_of_same_iteration_keeps_its_sums() -> None:
    """But not one that cannot follow to the others' iteration."""
    others = [having(8, (0, 1), (0, 1, 2)), having(8, (), (3, 4, 5))]
    verdict = judge([*others, having(8, (4, 5), (4, 5))], 6, lanes=Lanes(6, 3))
    assert not verdict.receivers and verdict.valid_sums(2) == {4, 5}
    assert judge([*others, having(6, (4, 5), (4, 5))], 6, lanes=Lanes(6, 3)).receivers == {2}


def test_sums_with_an_odd_replicas_results_count_nowhere() -> None:
    """The agreement that showed it broke at the second member, which keeps what the first has thrown away."""
    first = replace(having(7, (), ()), has_thrown_away=True)
    second = replace(having(7, (0, 1, 2, 3, 4, 5), (3, 4, 5)), sums_complete=True, complete=(0, 1))
    verdict = judge([first, second], 6, lanes=Lanes(6, 3))
    assert verdict.iteration == 7 and not verdict.step_first and not verdict.final
    assert not verdict.valid_sums(0) and not verdict.valid_sums(1)
    assert sorted(verdict.additions[0] + verdict.additions[1]) == list(range(6))


ACCOUNTS = -1
BUCKETS = 3


@dataclass(eq=False)
class Member:
    """A member of the model. A sum is written as what it is made of: micro-batch -> how often.

    `share`: what is accumulated per bucket (and in the accounts); `started`: copies of it, on their way through the
    group; `complete`: sums that have arrived.
    """

    iteration: int = 1
    held: tuple[int, ...] = ()
    share: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    started: dict[int, Counter[int]] = field(default_factory=dict)
    complete: dict[int, Counter[int]] = field(default_factory=dict)
    final: frozenset[int] = frozenset()
    entered: bool = False
    agreed: bool = False

    def compute(self, hand: tuple[int, ...]) -> None:
        self.held += hand
        for part in (ACCOUNTS, *range(BUCKETS)):
            self.share[part].update(hand)

    def sums(self) -> bool:
        return len(self.complete) == BUCKETS + 1

    def begin(self, iteration: int, hand: tuple[int, ...]) -> None:
        self.iteration, self.held, self.final = iteration, (), frozenset()
        self.entered = self.agreed = False
        self.share.clear()
        self.started.clear()
        self.complete.clear()
        self.compute(hand)


class Model:
    """Members that advance one small step at a time, in any order, under the rules of the real hook's collectives:
    a sum arrives only where all of the group have started it, likewise the agreement."""

    def __init__(self, draw: random.Random, members: int, micro_batches: int) -> None:
        self.draw, self.micro_batches = draw, micro_batches
        self.members = [Member() for _ in range(members)]
        self.group = list(self.members)
        for member, hand in zip(self.members, assign_evenly([()] * members, micro_batches), strict=True):
            member.begin(1, hand)
        self.kept = 0

    def advance(self, member: Member) -> None:
        """Start a bucket, receive a sum, enter the agreement, leave it, or commit."""
        parts = [part for part in [*reversed(range(BUCKETS)), ACCOUNTS] if part not in member.final]
        unstarted = [part for part in parts if part not in member.started]
        if member.agreed:
            self.commit(member)
        elif unstarted and self.draw.random() < 0.7:
            member.started[unstarted[0]] = Counter(member.share[unstarted[0]])
        elif not member.sums():
            self.receive(member)
        elif not member.entered:
            member.entered = True
        elif all(other.entered or other.iteration > member.iteration for other in self.group):
            member.agreed = True

    def receive(self, member: Member) -> None:
        for part in member.started:
            here = [other.started.get(part) for other in self.group if other.iteration == member.iteration]
            if len(here) == len(self.group) and None not in here and part not in member.complete:
                member.complete[part] = sum((share for share in here if share is not None), Counter())
                return

    def commit(self, member: Member) -> None:
        once = Counter(range(self.micro_batches))
        assert all(total == once for total in member.complete.values()), member.complete
        hands = assign_evenly([()] * len(self.group), self.micro_batches)
        member.begin(member.iteration + 1, hands[self.group.index(member)])

    def die(self, member: Member) -> None:
        self.members.remove(member)

    def regroup(self) -> None:
        """Exchange and judge. Now and then a member dies before all have heard the verdict: then once more."""
        for member in self.members:
            if member.agreed:  # the optimizer's step is not interrupted
                self.commit(member)
        told = [
            Position(True, m.iteration, m.sums(), m.held, tuple(part for part in m.complete if part != ACCOUNTS))
            for m in self.members
        ]
        verdict = judge(told, self.micro_batches)
        self.group = list(self.members)
        again = len(self.members) > 1 and self.draw.random() < 0.3
        deaf = (
            set(self.draw.sample(range(len(self.members)), self.draw.randrange(1, len(self.members)))) if again else ()
        )
        for rank, member in enumerate(self.group):
            if rank not in deaf:
                self.hear(member, rank, verdict)
        if again:
            self.die(self.draw.choice(self.members))
            self.regroup()
        assert sorted(m for member in self.members for m in member.held) == list(range(self.micro_batches))

    def hear(self, member: Member, rank: int, verdict: GroupVerdict) -> None:
        if rank in verdict.step_first:
            assert member.sums(), "it steps with sums that it does not have"
            self.commit(member)
            member.begin(verdict.iteration, verdict.additions[rank])
            return
        assert member.iteration == verdict.iteration
        member.complete = {part: member.complete[part] for part in verdict.final}
        member.final = verdict.final
        member.started.clear()
        member.entered = False
        member.compute(verdict.additions[rank])
        self.kept += len(verdict.final)


@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 14))
def test_survivors_agree_after_any_death(seed: int, members: int, micro_batches: int) -> None:
    weather(seed, members, micro_batches)


def test_training_model_produces_final_buckets() -> None:
    assert sum(weather(seed, 3, 6).kept for seed in range(50)) > 50


def weather(seed: int, members: int, micro_batches: int) -> Model:
    draw = random.Random(seed)
    model = Model(draw, members, micro_batches)
    for _ in range(draw.randrange(150)):
        model.advance(draw.choice(model.members))
        if len(model.members) > 1 and draw.random() < 0.05:
            model.die(draw.choice(model.members))
            for _ in range(draw.randrange(6)):  # some go on for a while before they notice
                model.advance(draw.choice(model.members))
            model.regroup()
    return model


# --- sharded optimizer state -------------------------------------------------------------------------


def test_stepped_member_waits_for_step_of_others() -> None:
    stepped = Position(True, 7, True, (0, 3), has_stepped=True, spans=((0, 64),))
    verdict = judge([stepped, at(7, (1, 4), sums=True), JOINER], 6)
    assert (verdict.iteration, verdict.step_first, verdict.shares) == (8, frozenset({0, 1}), (((0, 64),), (), ()))
    assert judge([stepped, at(8)], 6).step_first == {0}
    with pytest.raises(PositionsContradict, match="stepped"):
        judge([stepped, at(7, (1, 4))], 6)


def test_lost_part_leaves_no_state() -> None:
    verdict = judge([at(7, (0, 3), sums=True), at(7, (1, 4), sums=True)], 4, whole=False)
    assert (verdict.fresh, verdict.receivers, verdict.shares) == (True, frozenset({0, 1}), ())
    assert verdict.additions == ((0, 2), (1, 3))


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 2**20)).map(lambda two: (two[0], two[0] + two[1]))))
def test_position_row_carries_spans(spans: list[tuple[int, int]]) -> None:
    row = span_row(spans, len(spans) + 2)
    assert len(row) == 2 * len(spans) + 4
    assert spans_of(row) == tuple(spans)
