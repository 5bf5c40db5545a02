"""Micro-batches are dealt by measured speed: exactly as the integer programme says, by all ranks alike, not on
noise."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicrond.agents.trainer.lifecycle.deal import GAIN, WARM_UP, Deal, Dealing, factors_of
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import (
    assign_evenly,
    assign_lanes,
    deal_counts,
    initial_assignment,
    stores_needed,
    time_needed,
)
from unicrond.agents.trainer.lifecycle.programme import ORDINARY, Speeds, best_counts, duration
from unicrond.agents.trainer.lifecycle.results import ReplicaWord
from unicrond.agents.trainer.lifecycle.verdict import Position, judge

#: Microseconds of an ordinary micro-batch: an iteration of a few is a sample.
PACE_US = 50_000

# --- the integer programme ---------------------------------------------------------------------------


def every_count(micro_batches: int, members: int, least: int) -> list[tuple[int, ...]]:
    """All ways to divide so many micro-batches."""
    counts = itertools.product(range(least, micro_batches + 1), repeat=members)
    return [count for count in counts if sum(count) == micro_batches]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(50, 450), min_size=1, max_size=4), st.integers(1, 9), st.randoms())
def test_best_counts_match_brute_force(factors: list[int], micro_batches: int, drawn: random.Random) -> None:
    every = every_count(micro_batches, len(factors), int(micro_batches >= len(factors)))
    shortest = min(duration(counts, factors) for counts in every)
    best = best_counts(factors, micro_batches)
    assert best in every and duration(best, factors) == shortest
    present = drawn.choice(every)
    nearest = best_counts(factors, micro_batches, present)
    assert nearest in every and duration(nearest, factors) == shortest

    def moved(counts: Sequence[int]) -> int:
        return sum(abs(before - after) for before, after in zip(present, counts, strict=True))

    assert moved(nearest) == min(moved(counts) for counts in every if duration(counts, factors) == shortest)


def test_alike_members_are_dealt_evenly() -> None:
    assert best_counts([ORDINARY] * 3, 13) == (5, 4, 4)
    assert best_counts([200, 200], 6) == (3, 3), "slow alike is no difference"


def test_slow_member_keeps_one_micro_batch() -> None:
    """Else nobody would see it recover."""
    assert best_counts([ORDINARY, 4000, ORDINARY], 12) == (6, 1, 5)


def test_interleaved_pipeline_is_not_dealt_less_than_it_computes() -> None:
    """Fewer micro-batches than stages are filled up."""
    assert best_counts([100, 400, 100], 24, least=4) == (10, 4, 10)
    assert best_counts([100, 400, 100], 9, (3, 3, 3), least=4) == (3, 3, 3), "there are not so many"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_counts_are_dealt_in_turns(counts: list[int]) -> None:
    dealt = deal_counts(counts)
    assert [len(batch) for batch in dealt] == counts
    assert sorted(m for batch in dealt for m in batch) == list(range(sum(counts)))
    if len(set(counts)) == 1:
        assert dealt == assign_evenly([()] * len(counts), sum(counts))


# --- lanes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("factor", [110, 130, 200, 400])
def test_waits_for_running_sums_cost_next_to_nothing(members: int, factor: int) -> None:
    for length, slow in itertools.product((2, 4, 8, 16), range(members)):
        factors = [factor if rank == slow else ORDINARY for rank in range(members)]
        lanes, speeds = Lanes(members * length, members), Speeds(tuple(factors))
        even = best_counts([ORDINARY] * members, lanes.micro_batches)
        counts = best_counts(factors, lanes.micro_batches, even)
        assignment = initial_assignment(members, lanes, speeds, counts)
        assert time_needed(assignment.runs, speeds) == duration(counts, factors)
        assert tuple(len(assignment.micro_batches(rank)) for rank in range(members)) == counts
        assert max(stores_needed(runs, lanes) for runs in assignment.runs) <= 3


def test_what_remains_of_a_lost_member_goes_to_the_quick() -> None:
    lanes, speeds = Lanes(12, 3), Speeds((200, ORDINARY))
    even = assign_lanes([{0, 1}, {4, 5, 6, 7}], lanes)
    by_speed = assign_lanes([{0, 1}, {4, 5, 6, 7}], lanes, speeds)
    assert [len(even.micro_batches(rank)) for rank in range(2)] == [4, 2]
    assert [len(by_speed.micro_batches(rank)) for rank in range(2)] == [2, 4]


# --- when another deal is made -----------------------------------------------------------------------


class Group:
    """Members that agree, iteration by iteration, each with a `Dealing` of its own. `paces`: what each takes for a
    micro-batch, of the iteration's number."""

    def __init__(self, members: int, micro_batches: int, paces: Callable[[int, int], float]) -> None:
        lanes = Lanes(micro_batches, members)
        self.members = [Dealing(micro_batches, lanes) for _ in range(members)]
        self.paces, self.iteration = paces, 0
        self.moves: list[int] = []
        for member in self.members:
            member.begin([ORDINARY] * members)

    @property
    def deal(self) -> Deal:
        (deal,) = {member.deal for member in self.members}
        return deal

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            self.iteration += 1
            words = [
                ReplicaWord(False, int(self.paces(rank, self.iteration)), member.proposed_number)
                for rank, member in enumerate(self.members)
            ]
            has_moved = {member.add(words) for member in self.members}
            if has_moved == {True}:
                self.moves.append(self.iteration)
            assert len(has_moved) == 1
            assert len({member.deal for member in self.members}) == 1


@pytest.mark.parametrize("members", [3, 4, 6])
@pytest.mark.parametrize("factor", [1.3, 2.0, 4.0])
def test_slow_member_is_dealt_less_within_50_iterations(members: int, factor: float) -> None:
    noise = random.Random(1)
    group = Group(members, 8 * members, lambda rank, _: noise.gauss(PACE_US, 1000) * (factor if rank == 1 else 1))
    group.train(50)
    factors = [round(ORDINARY * factor) if rank == 1 else ORDINARY for rank in range(members)]
    optimum = duration(best_counts(factors, 8 * members), factors)
    assert duration(group.deal.counts, factors) == optimum
    assert group.moves[0] <= WARM_UP + 22


def test_recovered_member_is_dealt_as_much_again() -> None:
    noise = random.Random(2)

    def paces(rank: int, iteration: int) -> float:
        return noise.gauss(PACE_US, 1000) * (2 if rank == 0 and 100 < iteration <= 200 else 1)

    group = Group(3, 12, paces)
    group.train(200)
    assert group.deal.counts == (2, 5, 5)
    group.train(50)
    assert group.deal.counts == (4, 4, 4) and len(group.moves) == 2


def test_noise_moves_nothing() -> None:
    """An hour of half a second each, with noise as it is on a busy machine, and bursts."""
    for seed in range(3):
        noise = random.Random(seed)

        def paces(rank: int, iteration: int, noise: random.Random = noise) -> float:
            burst = 3 if iteration % 97 < 4 and rank == iteration // 97 % 4 else 1
            return PACE_US * noise.lognormvariate(0, 0.12) * burst

        group = Group(4, 64, paces)
        group.train(7200)
        assert group.moves == []


def test_members_slow_alike_are_dealt_evenly() -> None:
    group = Group(3, 12, lambda rank, iteration: PACE_US * (3 if iteration > 20 else 1))
    group.train(100)
    assert group.moves == []


def test_difference_that_no_deal_mends_moves_nothing() -> None:
    """1.2 times as slow with four micro-batches: with three, another one would take five."""
    group = Group(3, 12, lambda rank, _: PACE_US * (1.2 if rank == 2 else 1))
    group.train(100)
    assert group.moves == []


def test_older_hook_in_group_keeps_deal_even() -> None:
    member = Dealing(12, Lanes(12, 3))
    member.begin([200, ORDINARY, 0])
    assert member.deal.counts == (4, 4, 4)
    for _ in range(100):
        member.add([ReplicaWord(False, 4 * PACE_US), ReplicaWord(False, PACE_US), ReplicaWord(False, PACE_US)])
    assert member.proposal is None


def test_silent_member_keeps_deal_even() -> None:
    group = Group(3, 12, lambda rank, _: 0 if rank == 1 else PACE_US * (1 + 3 * rank))
    group.train(100)
    assert group.moves == []


def test_deal_holds_only_if_all_propose_it() -> None:
    group = Group(3, 12, lambda rank, _: PACE_US * (2 if rank == 0 else 1))
    while not group.members[0].proposed_number:
        group.train(1)
    words = [ReplicaWord(False, PACE_US, member.proposed_number) for member in group.members]
    words[2] = ReplicaWord(False, PACE_US, words[2].number % 5 + 1)
    assert {member.add(words) for member in group.members} == {False}
    assert group.deal.counts == (4, 4, 4)


def test_samples_begin_anew_with_each_deal() -> None:
    group = Group(3, 12, lambda rank, _: PACE_US * (2 if rank == 0 else 1))
    group.train(40)
    first = group.moves[0]
    group.paces = lambda rank, _: PACE_US
    group.train(100)
    assert group.moves[1] - first >= 20


def test_factors_are_those_of_the_ordinary_replica() -> None:
    assert factors_of([[10.0, 20.0, 10.2]] * 3) == (100, 196, 100), "a little less is nothing"
    assert factors_of([[10.0, 21.0]] * 3) == (100, 210), "of two the quicker is ordinary"


# --- what travels ------------------------------------------------------------------------------------


@given(st.booleans(), st.integers(0, 1 << 37), st.integers(0, (1 << 20) - 1), st.integers(0, 3))
def test_word_survives_its_row(stop: bool, pace_us: int, number: int, of_others: int) -> None:
    """Beside the two bits of audits (`detection/audits.py`), and below two of what is saved."""
    word = ReplicaWord(stop, pace_us, number)
    assert ReplicaWord.of(word.word() | of_others << 1) == word
    assert word.word() < 1 << 61 and word.word() & 0b111 == stop, "what older hooks read, and what audits write"


@given(st.lists(st.integers(0, 4095), max_size=8), st.lists(st.integers(0, 64), max_size=8))
def test_number_of_deal_fits_word(factors: list[int], counts: list[int]) -> None:
    assert 0 < Deal(Speeds(tuple(factors)), tuple(counts)).number < 1 << 20


def test_group_begins_with_deal_of_its_members() -> None:
    def position(factor: int) -> Position:
        told = Position(True, 7, False, (), factor=factor)
        return Position.from_row(told.row(12, 1, lanes=True), 12, lanes=True)

    verdict = judge([position(ORDINARY), position(200), position(ORDINARY)], 12, lanes=Lanes(12, 3))
    assert verdict.factors == (100, 200, 100)
    assert [len(batch) for batch in verdict.additions] == [5, 2, 5]
    mixed = judge([position(ORDINARY), position(200), position(0)], 12, lanes=Lanes(12, 3))
    assert [len(batch) for batch in mixed.additions] == [4, 4, 4]


def test_older_hooks_read_over_factors() -> None:
    """They take any other number than 0 for a state, and of the words the lowest 62 bits."""
    for told in (Position(False, 0, False, ()), Position(True, 7, False, (3, 70))):
        row, known = told.row(100, 1, lanes=True), replace(told, factor=200).row(100, 1, lanes=True)
        assert bool(known[0]) == bool(row[0])
        assert [word & ((1 << 62) - 1) for word in known[1:]] == row[1:]
        assert max(known) < 1 << 63
        assert Position.from_row(row, 100, lanes=True) == told
    newcomer = Position.from_row(Position(False, 0, False, (), factor=200).row(100, 1), 100)
    assert newcomer.factor == ORDINARY


def test_gain_is_worth_a_move() -> None:
    """16 micro-batches each, 1.1 times as slow: a deal cuts 3.4 of the 9.1 % by which the iteration is too long."""
    assert duration((16, 16), (1.1, 1)) / duration(best_counts((110, 100), 32), (1.1, 1)) > 1 + GAIN
