"""What a worker's gradients take is known before it starts: the trainer's own deal says the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import initial_assignment, stores_needed
from unicrond.core.worth.gradient_memory import Gradients, gradients, most_sums, parameters
from unicrond.events.vocabulary import LANES, ModelSpec, TaskSpec


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 20))
def test_gradient_memory_matches_deal_of_trainer(micro_batches: int, lanes: int, replicas: int) -> None:
    cut = Lanes(micro_batches, min(lanes, micro_batches))
    deal = initial_assignment(replicas, cut)
    assert most_sums(micro_batches, cut.count, replicas) == max(stores_needed(runs, cut) for runs in deal.runs)


@pytest.mark.parametrize(
    ("replicas", "expected"), [(1, Gradients(3, 0)), (2, Gradients(2, 1)), (3, Gradients(2, 1)), (4, Gradients(1, 1))]
)
def test_gradient_memory_of_four_lanes_matches_table(replicas: int, expected: Gradients) -> None:
    spec = TaskSpec(name="t", global_batch=12, accumulation="exact", env={LANES: "4"})
    assert gradients(spec, replicas) == expected
    assert expected.most == expected.sums + expected.healing + 1


def test_gradient_memory_holds_one_sum_if_sum_follows_deal() -> None:
    assert gradients(TaskSpec(name="t", global_batch=12, accumulation="float"), 3) == Gradients(1, 0)


def test_parameter_count_matches_model() -> None:
    spec = TaskSpec(name="t", tp=2, pp=2, model=ModelSpec(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200))
    assert 4 * parameters(spec) == pytest.approx(174.6e9, rel=0.01), "GPT-3"
