"""The sum of a step has the same bits, whoever computes what, on however many members, whatever is lost on the way."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from unicrond.agents.trainer.lifecycle.lanes import Lanes, Sums, blocks, halves, tree
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import (
    Assignment,
    Run,
    assign_lanes,
    initial_assignment,
    stores_needed,
)

Array: TypeAlias = NDArray[np.float32]

# --- the reference: the same bits from single micro-batches' gradients, by nothing of ours ----------


def reference(gradients: Sequence[Array], lanes: int) -> Array:
    """The sum of a step: of each lane in order, then of the lanes by the tree."""
    count = len(gradients)
    sums = []
    for lane in range(lanes):
        total = np.zeros_like(gradients[0])
        for micro_batch in range(lane * count // lanes, (lane + 1) * count // lanes):
            total = total + gradients[micro_batch]
        sums.append(total)
    return added(sums)


def added(sums: Sequence[Array]) -> Array:
    if len(sums) == 1:
        return sums[0]
    half = 1
    while 2 * half < len(sums):
        half *= 2
    return added(sums[:half]) + added(sums[half:])


# --- members that compute, give, are lost and come ---------------------------------------------------


class Member:
    """`finished`: of its runs. `done`: the micro-batches in its sums."""

    def __init__(self) -> None:
        self.sums: Sums[Array] = Sums(np.add)
        self.done: set[int] = set()
        self.runs: tuple[Run, ...] = ()
        self.into = 0


class Model:
    """An iteration of `gradients`; members take turns as `drawn` wants."""

    def __init__(self, gradients: Sequence[Array], lanes: Lanes, members: int, drawn: random.Random) -> None:
        self.gradients, self.lanes, self.drawn = gradients, lanes, drawn
        self.members = [Member() for _ in range(members)]
        self.computed = 0
        self.regroup()

    def regroup(self) -> None:
        self.deal: Assignment = assign_lanes([member.done for member in self.members], self.lanes)
        self.given: dict[tuple[int, int], tuple[Array, int]] = {}
        for rank, member in enumerate(self.members):
            member.sums.keep(self.deal.valid[rank], self.lanes)
            member.done, member.runs, member.into = set(self.deal.valid[rank]), self.deal.runs[rank], 0

    def turn(self) -> bool:
        """One member that can do something does it."""
        able = [member for rank, member in enumerate(self.members) if member.runs and self.can(rank, member.runs[0])]
        if able:
            self.act(self.drawn.choice(able))
        return bool(able)

    def can(self, rank: int, run: Run) -> bool:
        return run.source is None or self.members[rank].into > 0 or (run.lane, rank) in self.given

    def act(self, member: Member) -> None:
        run, rank = member.runs[0], self.members.index(member)
        if member.into == 0 and run.source is not None:
            total, length = self.given.pop((run.lane, rank))
            member.sums.running[run.lane] = total
            member.done.update(self.lanes.of(run.lane)[:length])
        if run.micro_batches:
            micro_batch = run.micro_batches[member.into]
            member.into += 1
            total = member.sums.running.get(run.lane, np.zeros_like(self.gradients[0]))
            member.sums.running[run.lane] = total + self.gradients[micro_batch]
            member.done.add(micro_batch)
            self.computed += 1
        if member.into == len(run.micro_batches):
            self.end(member, run)
            member.runs, member.into = member.runs[1:], 0

    def end(self, member: Member, run: Run) -> None:
        length = self.lanes.prefix_length(member.done, run.lane)
        if run.target is not None:
            self.given[run.lane, run.target] = member.sums.running[run.lane], length
        elif length == len(self.lanes.of(run.lane)):
            member.sums.end(run.lane)
            if self.drawn.random() < 0.5:
                member.sums.merge(self.lanes.root)

    def mishap(self) -> None:
        """Some are lost, some come; at least one that has something to do stays or comes."""
        self.members = [member for member in self.members if self.drawn.random() < 0.7]
        for _ in range(self.drawn.randrange(0 if self.members else 1, 3)):
            self.members.insert(self.drawn.randrange(len(self.members) + 1), Member())
        self.regroup()

    def sum(self) -> Array:
        """As the owners of the chunks add it up."""
        pieces: dict[tuple[int, int], Array] = {}
        for rank, member in enumerate(self.members):
            pieces |= {block: tree(block, member.sums.by_block(), np.add) for block in self.deal.ends[rank]}
        return tree(self.lanes.root, pieces, np.add)


@st.composite
def iterations(draw: st.DrawFn) -> tuple[list[Array], Lanes, int, int]:
    micro_batches = draw(st.integers(1, 24))
    lanes = Lanes(micro_batches, draw(st.integers(1, micro_batches)))
    seed = draw(st.integers(0, 2**32))
    values = np.random.default_rng(seed)
    gradients = values.normal(size=(micro_batches, 3)) * 10.0 ** values.uniform(-6, 6, size=(micro_batches, 1))
    return list(gradients.astype(np.float32)), lanes, draw(st.integers(1, 7)), seed


@settings(max_examples=200)
@given(iterations(), st.integers(0, 4))
def test_lanes_sum_to_bits_of_reference(case: tuple[list[Array], Lanes, int, int], mishaps: int) -> None:
    gradients, lanes, members, seed = case
    model = Model(gradients, lanes, members, random.Random(seed))
    for _ in range(mishaps):
        for _ in range(model.drawn.randrange(2 * lanes.micro_batches)):
            model.turn()
        model.mishap()
    while model.turn():
        pass
    assert not any(member.runs for member in model.members), "members wait in a circle"
    assert model.sum().tobytes() == reference(gradients, lanes.count).tobytes()
    assert mishaps or model.computed == lanes.micro_batches


def test_sum_order_changes_bits() -> None:
    """Else the property above would show nothing."""
    values = np.random.default_rng(1).normal(size=(12, 100)).astype(np.float32)
    assert reference(list(values), 3).tobytes() != reference(list(values[::-1]), 3).tobytes()
    assert reference(list(values), 3).tobytes() != reference(list(values), 4).tobytes()


# --- the deal ------------------------------------------------------------------------------------


@given(iterations(), st.integers(0, 30))
def test_lane_deal_covers_each_micro_batch_once_and_evenly(
    case: tuple[list[Array], Lanes, int, int], turns: int
) -> None:
    gradients, lanes, members, seed = case
    model = Model(gradients, lanes, members, random.Random(seed))
    for _ in range(turns):
        model.turn()
    model.mishap()
    new = model.deal
    every = [m for rank in range(len(new.valid)) for m in (*new.valid[rank], *new.micro_batches(rank))]
    assert sorted(every) == list(range(lanes.micro_batches))
    totals = [len(own) + len(new.micro_batches(rank)) for rank, own in enumerate(new.valid)]
    assert all(total <= min(totals) + 1 for rank, total in enumerate(totals) if new.micro_batches(rank))


@given(iterations())
def test_first_lane_deal_gives_contiguous_ranges(case: tuple[list[Array], Lanes, int, int]) -> None:
    _, lanes, members, _ = case
    stretches = [sorted(initial_assignment(members, lanes).micro_batches(rank)) for rank in range(members)]
    assert [m for own in stretches for m in own] == list(range(lanes.micro_batches))


def test_lane_per_member_transfers_no_sum() -> None:
    assert initial_assignment(3, Lanes(12, 3)).runs == tuple(
        (Run(lane, tuple(range(4 * lane, 4 * lane + 4))),) for lane in range(3)
    )
    assert initial_assignment(2, Lanes(12, 4)).ends == (((0, 2),), ((2, 4),))


def test_shared_lane_splits_between_members() -> None:
    """The earlier member computes its part first, the later one last."""
    one, other = initial_assignment(2, Lanes(12, 3)).runs
    assert one == (Run(1, (4, 5), target=1), Run(0, (0, 1, 2, 3)))
    assert other == (Run(2, (8, 9, 10, 11)), Run(1, (6, 7), source=0))


def test_lost_lane_is_dealt_as_chain() -> None:
    new = assign_lanes([{0, 1}, {4, 5, 6, 7}], Lanes(12, 3))
    assert new.valid == ({0, 1}, {4, 5, 6, 7})
    assert new.runs == ((Run(2, (8, 9), target=1), Run(0, (2, 3))), (Run(2, (10, 11), source=0),))
    assert new.ends == (((0, 1),), ((1, 2), (2, 3)))


def test_longer_sum_of_same_lane_wins() -> None:
    new = assign_lanes([{4, 5}, {4, 5, 6}, {0, 1, 2, 3}], Lanes(12, 3))
    assert [sorted(own) for own in new.valid] == [[], [4, 5, 6], [0, 1, 2, 3]]
    assert new.runs[1][-1] == Run(1, (7,))


def test_whole_blocks_take_precedence_over_single_lanes() -> None:
    """They cannot be taken apart again."""
    new = assign_lanes([{0, 1}, {0, 1, 2, 3}, {4, 5, 6, 7}, {2, 3}], Lanes(8, 4))
    assert [sorted(own) for own in new.valid] == [[], [0, 1, 2, 3], [4, 5, 6, 7], []]


@given(st.integers(1, 200))
def test_lane_blocks_are_those_of_tree(count: int) -> None:
    def nodes(block: tuple[int, int]) -> set[tuple[int, int]]:
        if block[1] - block[0] == 1:
            return {block}
        return {block}.union(*map(nodes, halves(block)))

    every = nodes((0, count))
    assert len(every) == 2 * count - 1
    for first in range(count):
        found = blocks(range(first, count), (0, count))
        assert every.issuperset(found) and sum(stop - start for start, stop in found) == count - first
    assert [Lanes(count, count).lane(m) for m in range(count)] == list(range(count))


def test_member_stores_few_sums() -> None:
    """As docs/design/transition.md says."""
    for count, members in itertools.product(range(1, 33), range(1, 33)):
        lanes = Lanes(2 * count, count)
        if members <= count:
            most = max(stores_needed(runs, lanes) for runs in initial_assignment(members, lanes).runs)
            assert most <= math.log2(math.ceil(count / members)) + 4
            assert most == 1 or members != count
            assert most == 2 or 2 * members != count


def test_lane_deal_needs_members() -> None:
    with pytest.raises(ValueError, match="in_sums"):
        assign_lanes([], Lanes(1, 1))
