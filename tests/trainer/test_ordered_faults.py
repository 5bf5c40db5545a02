"""Faults that arrive while a process trains: each happens once, where it was ordered, and nowhere else."""

from __future__ import annotations

import math
from collections import deque
from typing import get_args

import pytest

from unicrond.agents.protocol.injection import PHASES, POINTS, FaultInjector
from unicrond.events.vocabulary import Fault, FaultPhase


def ordered(**fault: object) -> tuple[FaultInjector, deque[Fault]]:
    orders: deque[Fault] = deque()
    injection = FaultInjector("t.1", "", orders)
    orders.append(Fault(worker="t.1", **fault))  # type: ignore[arg-type]
    return injection, orders


@pytest.mark.parametrize(("kind", "error"), [("exception", RuntimeError), ("oom", MemoryError)])
def test_ordered_error_raises_once_in_its_iteration(kind: str, error: type[Exception]) -> None:
    injection, _ = ordered(kind=kind, at_iteration=3)
    injection.fire("micro_batch", 2, 1)
    with pytest.raises(error, match="iteration 3"):
        injection.fire("micro_batch", 3, 1)
    injection.fire("micro_batch", 3, 1)


def test_order_without_iteration_fires_at_next_chance() -> None:
    injection, orders = ordered(kind="exception", phase="step")
    injection.fire("reducing", 8, 1)
    assert not orders, "it has been taken"
    with pytest.raises(RuntimeError):
        injection.fire("agreed", 8, 1)


def test_ordered_nan_spoils_one_loss() -> None:
    injection, _ = ordered(kind="nan", at_iteration=2)
    injection.fire("micro_batch", 1, 1)
    assert injection.spoil_loss(1.5) == 1.5
    injection.fire("micro_batch", 2, 1)
    assert math.isnan(injection.spoil_loss(1.5))
    assert injection.spoil_loss(1.5) == 1.5


def test_ordered_slowness_recurs_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[tuple[int, float]] = []
    injection, _ = ordered(kind="slow", at_iteration=2, seconds=0.5)
    for iteration in (1, 2, 3):
        monkeypatch.setattr("time.sleep", lambda seconds, now=iteration: slept.append((now, seconds)))
        for _ in range(4):
            injection.fire("micro_batch", iteration, 1)
    assert slept == [(2, 0.5), (3, 0.5)]


def test_fault_phases_map_to_points() -> None:
    assert set(PHASES) == set(get_args(FaultPhase))
    assert set(PHASES.values()) <= set(POINTS)
