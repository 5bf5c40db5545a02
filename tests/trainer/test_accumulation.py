"""Accumulation, and the sums of buckets: in turn, and loud where it cannot be right."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unicrond.agents.trainer.gradients.accumulation import Accumulation
from unicrond.agents.trainer.gradients.carried_buffers import CarriedBuffers
from unicrond.agents.trainer.gradients.reduction import Reduction
from unicrond.agents.trainer.groups.group import Operation
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.ledger import ReplicaAccount, Total
from unicrond.replay.simulation.trainer.buckets import Buckets


def test_accumulation_gives_mean_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    accumulation = Accumulation([parameter])
    for _ in range(3):
        (parameter * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    accumulation.settle([(0, accumulation.copy(0) * 2)], tokens=12)
    assert parameter.grad is not None and torch.equal(parameter.grad, torch.tensor([0.5, 1.0, 1.5]))
    assert parameter.main_grad.dtype == torch.float32
    accumulation.clear()
    assert parameter.grad is None and not accumulation.copy(0).any()


def test_accumulation_keeps_one_sum_per_open_lane() -> None:
    """Of eight lanes in a row, one after the other; and what the means stand in is what the optimizer knows."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    accumulation = Accumulation([parameter], lanes=Lanes(8, 8))
    most = 0
    for lane in range(8):
        accumulation.select_lane(lane)
        (parameter * 2.0**lane).sum().backward()
        most = max(most, len(accumulation.sums.all_sums()))
        accumulation.sums.end(lane)
    accumulation.sums.merge((0, 8))
    assert {block: store.flat.item() for block, store in accumulation.sums.of_blocks.items()} == {(0, 8): 255.0}
    assert most == 4
    accumulation.settle([(0, torch.tensor([255.0]))], tokens=255)
    assert parameter.grad is not None and parameter.grad.item() == 1.0
    accumulation.clear()
    accumulation.select_lane(3)
    assert not accumulation.sums.running[3].flat.any()


def test_several_gradients_of_one_micro_batch_are_noticed() -> None:
    """One after the other on a running sum they have other bits than added up first: nothing is computed ahead then."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    accumulation = Accumulation([parameter], lanes=Lanes(4, 2))
    for _ in range(2):
        accumulation.begin_micro_batches()
        parameter.sum().backward()
    assert not accumulation.has_several
    accumulation.go_ahead()
    accumulation.begin_micro_batches()
    for _ in range(2):
        parameter.sum().backward()
    assert accumulation.has_several
    accumulation.drop_ahead()
    running_sum = accumulation.take_store(spare=True)
    accumulation.resume_lane(1, running_sum)
    assert running_sum.flat.item() == 0.0


def test_accumulation_drops_invalid_sums() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    accumulation = Accumulation([parameter], lanes=Lanes(4, 2))
    for lane in (0, 1):
        accumulation.select_lane(lane)
        parameter.sum().backward()
    accumulation.sums.end(0)
    accumulation.keep({2})
    assert not accumulation.sums.of_blocks and accumulation.sums.running[1].flat.item() == 1.0
    accumulation.select_lane(0)
    assert not accumulation.sums.running[0].flat.any()


def test_norm_is_of_gradients_alone() -> None:
    """Marks and buffers travel beside the gradients; they would make one replica's norm stand out."""
    module = torch.nn.BatchNorm1d(2, affine=False)
    parameter = torch.nn.Parameter(torch.zeros(4))
    accumulation = Accumulation([parameter], torch_grads=True, buffers=CarriedBuffers([module]))
    reduction, group = Reduction(accumulation), Line()
    accumulation.begin_micro_batches()
    (parameter * torch.tensor([3.0, 4.0, 0.0, 0.0])).sum().backward()
    module(torch.randn(5, 2))
    accumulation.end_micro_batches([0])
    reduction.start(group, lambda: None)  # type: ignore[arg-type]
    assert len(group.started) == 2 and reduction.norm() == 5.0


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


def nothing() -> None:
    """Behind the sums."""


def sizes(line: Line) -> list[int]:
    return [numel for numel, _ in line.started]


def test_backward_starts_buckets_from_last_to_first() -> None:
    parameters, _, reduction, line = three_buckets()
    reduction.overlap(line, 2)
    sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    assert sizes(line) == []
    (parameters[0].sum() + parameters[2].sum()).backward()
    assert sizes(line) == [3], "the first is ready, but not in turn"
    parameters[1].sum().backward()
    assert sizes(line) == [3, 2, 1]
    reduction.start(line, nothing)
    assert sizes(line) == [3, 2, 1]


def test_bucket_without_gradient_starts_at_end() -> None:
    parameters, accumulation, reduction, line = three_buckets()
    reduction.overlap(line, 1)
    (parameters[0].sum() + parameters[1].sum()).backward()
    assert sizes(line) == []
    reduction.start(line, nothing)
    assert sizes(line) == [3, 2, 1]
    assert not accumulation.surplus


def test_surplus_gradient_fails_iteration() -> None:
    parameters, accumulation, reduction, line = three_buckets()
    reduction.overlap(line, 1)
    for _ in range(2):
        parameters[2].sum().backward()
    assert accumulation.surplus
    with pytest.raises(RuntimeError, match="overlap=False"):
        Total(1, (ReplicaAccount(3, 1, 1, 0, 1.0, 1, 0, surplus=True),)).check(3, 1)


def test_reduction_keeps_only_final_sums() -> None:
    _, _, reduction, line = three_buckets()
    reduction.start(line, nothing)
    for _, operation in line.started[:2]:
        operation.mark_done()
    assert set(reduction.complete()) == {1, 2}
    reduction.keep({2})
    assert set(reduction.complete()) == {2}
    again = SimpleNamespace(all_reduce=Line().all_reduce)
    reduction.start(again, nothing)  # type: ignore[arg-type]
    line.started[2][1].mark_done()  # a straggler of the group that was left
    assert set(reduction.complete()) == {2}
    with pytest.raises(KeyError):
        reduction.sums()


class Alone:
    """A simulated group of one member: what it enters is the sum."""

    rank = 0

    def gather(self, row: Sequence[int], timeout_s: float) -> Any:
        return SimpleNamespace(rows=[tuple(row)], over=True, error="")


def test_discarded_final_sum_is_recomputed() -> None:
    parameters, accumulation, reduction, line = three_buckets()
    simulated, alone = Buckets(micro_batches=2), Alone()

    def compute(micro_batch: int) -> None:
        sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        simulated.add(micro_batch, 0)
        reduction.start(line, nothing)
        while simulated.start_next(alone, 1.0):  # type: ignore[arg-type]
            pass

    compute(0)
    for _, operation in line.started:
        operation.mark_done()
    reduction.keep(range(3))
    simulated.keep(range(3), ())
    compute(1)
    assert sizes(line) == [3, 2, 1], "a final sum is not reduced again"
    assert set(reduction.complete()) == set(simulated.complete()) == {0, 1, 2}
    assert not simulated.are_right(), "it lacks what was computed since"
    reduction.keep(())
    simulated.keep((), ())
    reduction.start(line, nothing)
    while simulated.start_next(alone, 1.0):  # type: ignore[arg-type]
        pass
    assert sizes(line) == [3, 2, 1, 3, 2, 1]
    assert [accumulation.copy(bucket).tolist() for bucket in range(3)] == [[2.0], [2.0] * 2, [2.0] * 3]
    assert simulated.are_right()
