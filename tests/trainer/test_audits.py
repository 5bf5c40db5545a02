"""Whose bits are wrong, by what all replicas have computed of one micro-batch."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.detection.audits import ATTENTION, Audits, AuditVerdict, interval, judge, judge_again
from unicrond.agents.trainer.detection.divergence import gradients_number
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.ledger import LaneLedger
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import initial_assignment
from unicrond.agents.trainer.loop.recomputation import audited_run

A, B, C, D = (gradients_number(bits, 1.0) for bits in (11, 22, 33, 44))
FAR = gradients_number(55, 2.0)
CLEAN, OPEN = AuditVerdict(), AuditVerdict(is_open=True)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([[A, 0], [A, 0]], CLEAN),
        ([[A, 3], [B, 3]], OPEN),
        ([[A, 3], [B, 3], [A, 3]], AuditVerdict(odd=(1,))),
        ([[A, 3], [B, 0], [A, 3]], OPEN),
        ([[A, 3], [B, 3], [C, 3]], OPEN),
        ([[A, 3], [0, 3], [A, 3]], CLEAN),
        ([[A, 3], [0, 3], [B, 3]], OPEN),
        ([[0, 3], [0, 3]], CLEAN),
    ],
)
def test_first_look(rows: list[list[int]], verdict: AuditVerdict) -> None:
    assert judge(rows) == verdict


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([[B, A, A, 3], [A, A, A, 3]], AuditVerdict(odd=(0,))),
        ([[B, C, D, 3], [A, A, A, 3]], AuditVerdict(odd=(0,))),
        ([[B, B, B, 3], [A, A, A, 3]], AuditVerdict(doubt="unequal")),
        ([[B, C, B, 3], [A, A, C, 3]], AuditVerdict(doubt="unsteady")),
        ([[A, A, A, 3], [B, B, B, 0], [A, A, A, 3]], AuditVerdict(doubt="deviating")),
        ([[A, A, A, 3], [FAR, FAR, FAR, 0], [A, A, A, 3]], AuditVerdict(odd=(1,))),
        ([[A, A, A, 3], [B, C, C, 0], [A, A, A, 3]], AuditVerdict(odd=(1,))),
        ([[A, A, A, 3], [B, C, A, 3], [D, B, A, 3]], AuditVerdict(doubt="unsteady")),
        ([[A, A, A, 3], [A, A, A, 3], [B, B, B, 3], [B, B, B, 3]], AuditVerdict(doubt="unequal")),
        ([[A, A, A, 3], [0, 0, 0, 3], [B, A, A, 3]], AuditVerdict(odd=(2,))),
        ([[0, 0, 0, 3], [0, 0, 0, 3]], CLEAN),
    ],
)
def test_second_look(rows: list[list[int]], verdict: AuditVerdict) -> None:
    assert judge_again(rows) == verdict


@given(st.lists(st.lists(st.sampled_from([A, B, C, FAR]), min_size=3, max_size=3), min_size=2, max_size=9), st.data())
def test_no_more_than_a_minority_is_ever_at_fault(results: list[list[int]], data: st.DataObject) -> None:
    rows = [[*row, data.draw(st.integers(0, 2))] for row in results]
    for verdict in (judge([[row[0], row[3]] for row in rows]), judge_again(rows)):
        assert len(verdict.odd) < len(rows) and (len(rows) == 2 or 2 * len(verdict.odd) < len(rows))
        assert not (verdict.odd and verdict.is_open)
    most, count = Counter(row[0] for row in rows).most_common(1)[0]
    if 2 * count > len(rows):
        assert all(rows[rank][0] != most for rank in judge([[row[0], row[3]] for row in rows]).odd)


@given(st.integers(1, 4096), st.integers(2, 512), st.floats(0.0005, 0.5))
def test_audits_cost_no_more_than_their_budget(micro_batches: int, members: int, budget: float) -> None:
    """A micro-batch of each `interval`-th iteration, of all that a replica computes in the meantime."""
    every = interval(micro_batches, members, budget)
    assert 1 / (every * micro_batches / members) <= budget * (1 + 1e-9) or every == 1
    assert every == max(1, math.ceil(members / (micro_batches * budget)))


def test_nobody_audits_alone_or_for_nothing() -> None:
    assert interval(8, 1, 0.005) == interval(8, 3, 0.0) == 0


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 40), st.integers(1, 100))
def test_every_replica_that_begins_a_lane_comes_up(members: int, count: int, micro_batches: int, every: int) -> None:
    lanes = Lanes(max(micro_batches, count), count)
    owners, assignment = [], initial_assignment(members, lanes)
    for number in range(1, 101):
        ledger = LaneLedger(number * every, lanes=lanes)
        ledger.assign_lanes(assignment, 0)
        owner, run = audited_run(ledger)
        assert run.source is None and run.micro_batches[0] == lanes.of(run.lane)[0], "its sum begins with zero"
        owners.append(owner)
    first = {rank for rank, runs in enumerate(assignment.runs) if runs and runs[0].source is None}
    assert set(owners) == first


def ask(audits: Audits, iteration: int, *, members: int = 3) -> int:
    return audits.word(iteration, 1, 12, members)


def test_due_where_the_leader_asks_and_all_are_able() -> None:
    leader, other, older = Audits(0.5, is_able=True), Audits(0.0, is_able=True), Audits(0.5, is_able=False)
    words = [ask(leader, 4), ask(other, 4)]
    for audits in (leader, other):
        audits.agree(words, 4, 1)
        assert audits.is_due(5, 1) and not audits.is_due(5, 2) and not audits.is_due(6, 1)
    leader.agree([*words, ask(older, 5)], 5, 1)
    assert ask(older, 5) == 0 and not leader.is_due(6, 1), "an older hook says nothing"
    leader.agree(list(reversed(words)), 5, 1)
    assert not leader.is_due(6, 1), "the first member's word counts alone"


def test_no_audits_where_they_tell_nothing() -> None:
    audits = Audits(0.5, is_able=True)
    audits.end(AuditVerdict(doubt="unequal"), 1)
    assert ask(audits, 4) == 0 and audits.word(4, 2, 12, 3) != 0, "another group has another look"
    audits.bits_differ = True
    newcomer = Audits(0.5, is_able=True)
    newcomer.inherit(audits.words())
    assert newcomer.word(4, 2, 12, 3) == 0
    newcomer.inherit(None)  # the state of an older hook
    assert not newcomer.bits_differ


def test_iterations_after_a_spike_are_audited() -> None:
    audits = Audits(0.0001, is_able=True)
    assert ask(audits, 10) == ask(Audits(0.0, is_able=True), 10), "able, and asks for nothing"
    audits.attend()
    asked = [ask(audits, iteration) for iteration in range(11, 11 + ATTENTION + 1)]
    assert len(set(asked[:-1])) == 1 and asked[-1] == ask(Audits(0.0, is_able=True), 10) != asked[0]
