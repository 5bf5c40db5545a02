"""Accumulation, and the sums of buckets: exact where it must be, in turn, and loud where it cannot be right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agents.trainer.gradients.accumulation import UNITS, Accumulation
from agents.trainer.gradients.reduction import Reduction
from agents.trainer.groups.group import Operation
from agents.trainer.ledger import PEAK_MAX, Account, Overflow, Total
from replay.simulation.buckets import Buckets

gradients = st.lists(
    st.floats(-1e3, 1e3, width=32).map(lambda value: torch.tensor([value, value / 3, value * 1e-9])),
    min_size=1, max_size=12,
)  # fmt: skip


def accumulated(parameter: torch.nn.Parameter, given_ones: list[torch.Tensor], exact: bool = True) -> Accumulation:
    accumulation = Accumulation([parameter], exact=exact)
    for gradient in given_ones:
        (parameter * gradient).sum().backward()
    return accumulation


@given(gradients, st.integers(0, 2**32), st.integers(1, 4))
def test_exact_sums_depend_on_no_order_and_no_deal(ones: list[torch.Tensor], seed: int, replicas: int) -> None:
    alone = accumulated(torch.nn.Parameter(torch.zeros(3)), ones).copy(0)
    shuffled = random.Random(seed).sample(ones, len(ones))
    shares = [
        accumulated(torch.nn.Parameter(torch.zeros(3)), shuffled[replica::replicas]).copy(0)
        for replica in range(replicas)
    ]
    assert torch.equal(sum(shares[1:], shares[0]), alone)
    exactly = sum(torch.stack(ones).double())
    assert (alone.double() / UNITS - exactly).abs().max() <= len(ones) / UNITS / 2


def test_large_enough_gradients_keep_all_their_bits() -> None:
    parameter = torch.nn.Parameter(torch.zeros(100))
    gradient = (torch.rand(100) + 0.5) * 2.0**-16
    assert torch.equal(accumulated(parameter, [gradient]).copy(0).double() / UNITS, gradient.double())


@pytest.mark.parametrize("exact", [False, True])
def test_settled_gradients_are_the_mean(exact: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    accumulation = accumulated(parameter, [torch.tensor([1.0, 2.0, 3.0])] * 3, exact)
    accumulation.settle([accumulation.copy(0) * 2], tokens=12)
    assert parameter.grad is not None and torch.equal(parameter.grad, torch.tensor([0.5, 1.0, 1.5]))
    assert parameter.main_grad.dtype == torch.float32
    accumulation.clear()
    assert parameter.grad is None and not accumulation.copy(0).any()


@pytest.mark.parametrize("bad", [PEAK_MAX * 0.6, float("inf"), float("nan"), 1e38])
def test_what_exact_sums_cannot_hold_is_told(bad: float) -> None:
    peaks = [accumulated(torch.nn.Parameter(torch.zeros(2)), [torch.tensor([1.0, bad])]).peak() for _ in range(2)]
    accounts = tuple(Account(3, 1, 1, 0, 1.0, 1, 0, peak=peak) for peak in peaks)
    with pytest.raises(Overflow, match="accumulation: float"):
        Total(1, tuple(Account.from_row(account.row()) for account in accounts)).check(3, 2)


def test_float_sums_have_no_peak() -> None:
    assert accumulated(torch.nn.Parameter(torch.zeros(1)), [torch.tensor([1e30])], exact=False).peak() == 0.0


# --- in turn -------------------------------------------------------------------------------------


class Line:
    """A group that notes what was started; sums arrive when the test says so."""

    def __init__(self) -> None:
        self.started: list[tuple[int, Operation]] = []

    def all_reduce(self, tensor: torch.Tensor) -> Operation:
        operation = Operation()
        self.started.append((int(tensor.numel()), operation))
        return operation


def three_buckets() -> tuple[list[torch.nn.Parameter], Accumulation, Reduction, Any]:
    """Buckets of 1, 2 and 3 elements."""
    parameters = [torch.nn.Parameter(torch.ones(numel)) for numel in (1, 2, 3)]
    accumulation = Accumulation(parameters, bucket_bytes=4)
    return parameters, accumulation, Reduction(accumulation), Line()


def sizes(line: Line) -> list[int]:
    return [numel for numel, _ in line.started]


def test_buckets_are_started_inside_the_backward_from_the_last_to_the_first() -> None:
    parameters, _, reduction, line = three_buckets()
    reduction.overlap(line, 2)
    sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    assert sizes(line) == []
    (parameters[0].sum() + parameters[2].sum()).backward()
    assert sizes(line) == [3], "the first is ready, but not in turn"
    parameters[1].sum().backward()
    assert sizes(line) == [3, 2, 1]
    reduction.start(line)
    assert sizes(line) == [3, 2, 1]


def test_what_never_gets_a_gradient_is_started_at_the_end() -> None:
    parameters, accumulation, reduction, line = three_buckets()
    reduction.overlap(line, 1)
    (parameters[0].sum() + parameters[1].sum()).backward()
    assert sizes(line) == []
    reduction.start(line)
    assert sizes(line) == [3, 2, 1]
    assert not accumulation.surplus


def test_a_gradient_too_many_fails_the_iteration() -> None:
    parameters, accumulation, reduction, line = three_buckets()
    reduction.overlap(line, 1)
    for _ in range(2):
        parameters[2].sum().backward()
    assert accumulation.surplus
    with pytest.raises(RuntimeError, match="overlap=False"):
        Total(1, (Account(3, 1, 1, 0, 1.0, 1, 0, surplus=True),)).check(3, 1)


def test_only_final_sums_are_kept() -> None:
    _, _, reduction, line = three_buckets()
    reduction.start(line)
    for _, operation in line.started[:2]:
        operation.end_well()
    assert set(reduction.complete()) == {1, 2}
    reduction.keep({2})
    assert set(reduction.complete()) == {2}
    again = SimpleNamespace(all_reduce=Line().all_reduce)
    reduction.start(again)  # type: ignore[arg-type]
    line.started[2][1].end_well()  # a straggler of the group that was left
    assert set(reduction.complete()) == {2}
    with pytest.raises(KeyError):
        reduction.sums()


class Alone:
    """A simulated group of one member: what it enters is the sum."""

    def gather(self, row: Sequence[int], timeout_s: float) -> Any:
        return SimpleNamespace(rows=[tuple(row)], over=True, error="")


def test_a_final_sum_that_is_given_up_is_made_again_from_all_that_was_computed() -> None:
    parameters, accumulation, reduction, line = three_buckets()
    simulated, alone = Buckets(micro_batches=2), Alone()

    def compute(micro_batch: int) -> None:
        sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        simulated.add(micro_batch)
        reduction.start(line)
        while simulated.start_next(alone, 1.0):  # type: ignore[arg-type]
            pass

    compute(0)
    for _, operation in line.started:
        operation.end_well()
    reduction.keep(range(3))
    simulated.keep(range(3))
    compute(1)
    assert sizes(line) == [3, 2, 1], "a final sum is not reduced again"
    assert set(reduction.complete()) == set(simulated.complete()) == {0, 1, 2}
    assert not simulated.are_right(), "it lacks what was computed since"
    reduction.keep(())
    simulated.keep(())
    reduction.start(line)
    while simulated.start_next(alone, 1.0):  # type: ignore[arg-type]
        pass
    assert sizes(line) == [3, 2, 1, 3, 2, 1]
    assert [accumulation.copy(bucket).tolist() for bucket in range(3)] == [[2.0], [2.0] * 2, [2.0] * 3]
    assert simulated.are_right()
