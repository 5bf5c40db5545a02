"""When an iteration is late, and when all have become slow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.detection.baseline import ENOUGH, HANG, LAST_WRITE_US, RECENT, WARM_UP, WINDOW, Baseline

START_US = 600_000_000
FLOOR_US = 10_000
USUAL_US = 100_000


def trained(durations: list[int], floor_us: int = FLOOR_US) -> Baseline:
    baseline = Baseline(floor_us=floor_us, start_us=START_US)
    for duration in durations:
        baseline.add(duration)
    return baseline


def steady(count: int = WARM_UP + WINDOW, usual_us: int = USUAL_US, noise: float = 0.02) -> list[int]:
    draw = random.Random(1)
    return [round(usual_us * (1 + draw.uniform(-noise, noise))) for _ in range(count)]


def slow_at(baseline: Baseline, durations: list[int]) -> list[int]:
    """After how many of the durations it was told, each time."""
    told = []
    for number, duration in enumerate(durations, 1):
        baseline.add(duration)
        if baseline.detect_slowdown():
            told.append(number)
    return told


def test_baseline_allows_start_time_before_warm_up() -> None:
    assert Baseline(floor_us=FLOOR_US, start_us=START_US).limit_us() == START_US
    assert trained([USUAL_US] * (WARM_UP + ENOUGH - 1)).limit_us() == START_US


def test_baseline_limit_is_three_times_usual() -> None:
    assert trained([USUAL_US] * (WARM_UP + ENOUGH)).limit_us() == HANG * USUAL_US


def test_baseline_limit_has_floor() -> None:
    assert trained([100] * 20, floor_us=1_000_000).limit_us() == 1_000_000


def test_baseline_excludes_warm_up_and_checkpoints() -> None:
    baseline = trained([5_000_000] * WARM_UP + [USUAL_US] * ENOUGH)
    baseline.add(2_000_000, checkpoint=True)
    assert baseline.usual_us == USUAL_US
    assert baseline.limit_us() == HANG * USUAL_US
    assert baseline.limit_us(checkpoint=True) == HANG * USUAL_US + 3 * 2_000_000


def test_first_checkpoint_gets_start_time() -> None:
    baseline = trained([USUAL_US] * 10)
    assert baseline.limit_us(checkpoint=True) == HANG * USUAL_US + START_US


def test_noisy_machine_raises_limit() -> None:
    baseline = trained([USUAL_US] * 10 + [450_000])
    assert baseline.usual_us == USUAL_US
    assert baseline.limit_us() == 900_000
    for _ in range(WINDOW):
        baseline.add(USUAL_US)
    assert baseline.limit_us() == HANG * USUAL_US, "one long iteration is forgotten with its window"


def test_new_generation_keeps_limit_of_task() -> None:
    baseline = trained([USUAL_US] * 10)
    baseline.reset()
    assert baseline.usual_us == 0
    assert baseline.limit_us() == HANG * USUAL_US
    assert baseline.collective_timeout_us() == 30_000_000
    baseline.reset()
    assert baseline.limit_us() == HANG * USUAL_US, "a second change before anything was learnt forgets nothing"


def test_newcomer_inherits_limit() -> None:
    known = trained([400_000, *[USUAL_US] * 10])
    newcomer = Baseline(floor_us=FLOOR_US, start_us=START_US)
    newcomer.reset(share=4, joins=True)
    newcomer.inherit(known.words())
    assert newcomer.limit_us() == HANG * USUAL_US + 400_000, "what a first iteration took in this task at most"
    for _ in range(WARM_UP):
        newcomer.add(USUAL_US)
    assert newcomer.limit_us() == HANG * USUAL_US
    own = trained([2 * USUAL_US] * 10)
    own.inherit(known.words())
    assert own.usual_us == 2 * USUAL_US, "who knows better inherits nothing"


@pytest.mark.parametrize("words", [None, [], [1, 2], [1, 2, 3, -4], [1, 2, 3, "4"], [0, 0, 0, 0]])
def test_baseline_refuses_invalid_inheritance(words: object) -> None:
    newcomer = Baseline(floor_us=FLOOR_US, start_us=START_US)
    newcomer.inherit(words)
    assert newcomer.limit_us() == START_US


def test_fewer_replicas_get_more_time() -> None:
    baseline = Baseline(floor_us=FLOOR_US, start_us=START_US)
    baseline.reset(share=4)
    for _ in range(10):
        baseline.add(USUAL_US)
    baseline.reset(share=6)
    assert baseline.limit_us() == HANG * USUAL_US * 6 // 4
    baseline.reset(share=3)
    assert baseline.limit_us() == HANG * USUAL_US * 6 // 4


def test_collective_timeout_is_well_above_limit() -> None:
    assert trained([USUAL_US] * 10).collective_timeout_us() == 30_000_000
    assert trained([4_000_000] * 10).collective_timeout_us() == 10 * HANG * 4_000_000
    assert Baseline(floor_us=FLOOR_US, start_us=START_US).collective_timeout_us() == START_US


def test_end_limit_allows_last_save() -> None:
    baseline = trained([USUAL_US] * 10)
    assert baseline.end_limit_us(20_000_000) == HANG * USUAL_US + 6 * 20_000_000
    assert baseline.end_limit_us(20_000) == HANG * USUAL_US + LAST_WRITE_US, "storage may stall"
    assert baseline.end_limit_us(None) == HANG * USUAL_US + LAST_WRITE_US, "others write"
    assert baseline.end_limit_us(0) == HANG * USUAL_US + START_US, "how long it takes is not known"


@given(st.lists(st.integers(1, 10**9), max_size=100), st.booleans())
def test_limit_is_never_below_floor_or_three_times_usual(durations: list[int], checkpoint: bool) -> None:
    baseline = trained(durations)
    limit_us = baseline.limit_us(checkpoint=checkpoint)
    assert limit_us >= max(FLOOR_US, HANG * baseline.usual_us)
    assert baseline.collective_timeout_us() >= limit_us or baseline.collective_timeout_us() >= START_US or checkpoint


def test_slowdown_is_reported_once_per_episode() -> None:
    baseline = trained(steady())
    assert baseline.detect_slowdown() == 0
    told = slow_at(baseline, steady(40, round(USUAL_US * 1.3)))
    assert len(told) == 1 and RECENT // 2 <= told[0] <= RECENT
    assert len(slow_at(baseline, steady(40, round(USUAL_US * 2)))) == 1, "it has become worse"
    assert slow_at(baseline, steady(40)) == []
    assert len(slow_at(baseline, steady(40, round(USUAL_US * 1.3)))) == 1


def test_single_long_iterations_are_no_slowdown() -> None:
    durations = steady(200)
    durations[50::10] = [USUAL_US * 2] * len(durations[50::10])
    assert slow_at(trained([]), durations) == []


def test_five_percent_are_no_slowdown() -> None:
    baseline = trained(steady())
    assert slow_at(baseline, steady(60, round(USUAL_US * 1.05))) == []


def test_noise_alone_is_no_slowdown() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        assert slow_at(trained([]), [round(USUAL_US * draw.uniform(0.8, 1.2)) for _ in range(300)]) == []
