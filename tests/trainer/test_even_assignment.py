"""Dealing: everything exactly once, nothing taken away, evenly, and round-robin from empty hands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.lifecycle.micro_batch_assignment import assign_evenly


@st.composite
def hands(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], int]:
    micro_batches = draw(st.integers(0, 40))
    replicas = draw(st.integers(1, 6))
    holder = draw(st.lists(st.integers(-1, replicas - 1), min_size=micro_batches, max_size=micro_batches))
    held = [tuple(m for m in range(micro_batches) if holder[m] == replica) for replica in range(replicas)]
    return held, micro_batches


@given(hands())
def test_deal_assigns_each_micro_batch_once(case: tuple[list[tuple[int, ...]], int]) -> None:
    held, micro_batches = case
    dealt = assign_evenly(held, micro_batches)
    assert sorted(m for hand in [*held, *dealt] for m in hand) == list(range(micro_batches))


@given(hands())
def test_deal_evens_out(case: tuple[list[tuple[int, ...]], int]) -> None:
    held, micro_batches = case
    dealt = assign_evenly(held, micro_batches)
    totals = [len(before) + len(new) for before, new in zip(held, dealt, strict=True)]
    for replica, new in enumerate(dealt):
        if new:
            assert totals[replica] <= min(totals) + 1


@given(st.integers(0, 40), st.integers(1, 6))
def test_first_deal_is_round_robin(micro_batches: int, replicas: int) -> None:
    dealt = assign_evenly([()] * replicas, micro_batches)
    assert dealt == tuple(tuple(range(replica, micro_batches, replicas)) for replica in range(replicas))


@given(hands())
def test_repeated_deal_assigns_nothing(case: tuple[list[tuple[int, ...]], int]) -> None:
    held, micro_batches = case
    after = [before + new for before, new in zip(held, assign_evenly(held, micro_batches), strict=True)]
    assert assign_evenly(after, micro_batches) == ((),) * len(held)


def test_work_of_lost_replica_is_dealt_round_robin() -> None:
    assert assign_evenly([(0, 3, 6, 9), (1, 4, 7, 10)], 12) == ((2, 8), (5, 11))


@pytest.mark.parametrize("held", [[(0,), (0,)], [(5,)], [(-1,)], []])
def test_deal_refuses_impossible_assignments(held: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="assignments"):
        assign_evenly(held, 5)
