"""Who straggles: found at the noise that was measured, hardly ever where nobody does. Noise is drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicrond.agents.trainer.detection.stragglers import LONGEST, SAMPLE_US, WARM_UP, StragglerFinding, Stragglers

ITERATION_US = 250_000
MICRO_BATCH_US = 30_000
#: Until it must be found.
PROMPT = 50
Noise = Callable[[random.Random], float]


def quiet(draw: random.Random) -> float:
    """As of GPUs: 2 %."""
    return draw.gauss(1.0, 0.02)


def noisy(draw: random.Random) -> float:
    """As of two replicas on two cores beside other programs: 7 %, with a tail of bursts."""
    return draw.gauss(1.0, 0.07) * (draw.uniform(1.2, 2.0) if draw.random() < 0.03 else 1.0)


class Training:
    """Replicas that compute, each as slow as `factors` says."""

    def __init__(
        self, replicas: int = 2, noise: Noise = quiet, seed: int = 1, iteration_us: int = ITERATION_US
    ) -> None:
        self.stragglers = Stragglers()
        self.factors = [1.0] * replicas
        self.iteration = 0
        self._noise, self._draw, self._iteration_us = noise, random.Random(seed), iteration_us
        self._now_us = 10**9

    def run(self, iterations: int = 10**9, dealt: Iterable[int] = ()) -> Iterable[tuple[int, StragglerFinding]]:
        """The findings, each with its iteration."""
        hands = list(dealt) or [4] * len(self.factors)
        for _ in range(iterations):
            self.iteration += 1
            self._now_us += self._iteration_us
            together = self._draw.uniform(0.8, 1.6)  # what all replicas share
            computed = {
                f"t.{rank + 1}": (int(MICRO_BATCH_US * together * factor * self._noise(self._draw) * hand), hand)
                for rank, (factor, hand) in enumerate(zip(self.factors, hands, strict=True))
            }
            for finding in self.stragglers.add(self.iteration, self._now_us, computed):
                yield self.iteration, finding

    def now_us(self) -> int:
        return self._now_us


@pytest.mark.parametrize("percent", [10, 20, 30])
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_straggler_from_start_is_found_within_50_iterations(replicas: int, percent: int) -> None:
    for seed in range(10):
        training = Training(replicas, seed=seed)
        training.factors[1] = 1 + percent / 100
        ((iteration, found),) = training.run(PROMPT)
        assert found.worker == "t.2" and iteration <= PROMPT
        assert found.factor == pytest.approx(1 + percent / 100, abs=0.03)
        assert found.own_us == pytest.approx(found.others_us * found.factor, abs=2)
        assert found.since_iteration == WARM_UP + 1


@pytest.mark.parametrize("percent", [20, 30])
def test_measured_noise_hides_no_20_percent_straggler(percent: int) -> None:
    found = 0
    for seed in range(40):
        training = Training(noise=noisy, seed=seed)
        training.factors[1] = 1 + percent / 100
        found += [one.worker for _, one in training.run(PROMPT)] == ["t.2"]
    assert found >= 38


@pytest.mark.parametrize(("noise", "most"), [(quiet, 0), (noisy, 1)])
def test_straggler_false_alarms_are_rare(noise: Noise, most: int) -> None:
    """Beside noise as large as was ever measured: in an hour of quarter seconds at most one."""
    training = Training(noise=noise, seed=3)
    alarms = [found for _, found in training.run(14_400) if not found.over]
    assert len(alarms) <= most


def test_late_straggler_is_found_with_start() -> None:
    training = Training()
    assert not list(training.run(200))
    training.factors[0] = 1.2
    ((iteration, found),) = training.run(PROMPT)
    assert found.worker == "t.1" and iteration <= 250
    assert abs(found.since_iteration - 201) <= 3
    assert training.now_us() - found.since_us == pytest.approx((250 - found.since_iteration + 1) * ITERATION_US)


def test_straggler_is_reported_at_start_change_and_end() -> None:
    training = Training()
    training.factors[1] = 1.2
    assert [found.over for _, found in training.run(400)] == [False]
    training.factors[1] = 1.6
    *_, (_, worse) = training.run(100)
    assert worse.factor == pytest.approx(1.6, abs=0.3) and not worse.over
    assert worse.since_iteration == WARM_UP + 1, "it was slow all the time"
    training.factors[1] = 1.0
    *_, (iteration, over) = training.run(100)
    assert over.over and over.worker == "t.2" and iteration <= 500 + 2 * LONGEST
    assert not list(training.run(200))


@pytest.mark.parametrize("length", [5, 9])
def test_burst_is_no_straggler(length: int) -> None:
    training = Training()
    list(training.run(100))
    for _ in range(10):
        training.factors[1] = 3.0
        assert not list(training.run(length))
        training.factors[1] = 1.0
        assert not list(training.run(40))


def test_common_slowdown_is_no_straggler() -> None:
    training = Training(3)
    list(training.run(60))
    training.factors = [1.5, 1.5, 1.5]
    assert not list(training.run(200))


def test_stragglers_compare_per_micro_batch() -> None:
    training = Training()
    assert not list(training.run(100, dealt=[6, 2]))
    training.factors[1] = 1.2
    assert [found.worker for _, found in training.run(PROMPT, dealt=[6, 2])] == ["t.2"]


def test_idle_replica_is_not_compared() -> None:
    training = Training(3)
    training.factors[1] = 1.3
    assert [found.worker for _, found in training.run(PROMPT, dealt=[4, 4, 0])] == ["t.2"]


def test_single_replica_is_not_compared() -> None:
    training = Training(1)
    training.factors[0] = 2.0
    assert not list(training.run(200))


def test_quick_iterations_are_aggregated() -> None:
    training = Training(iteration_us=SAMPLE_US // 10)
    training.factors[1] = 1.3
    iteration, _ = next(iter(training.run(2000)))
    assert 20 * 10 <= iteration <= 43 * 10


def test_new_group_repeats_no_straggler() -> None:
    training = Training(3)
    training.factors[2] = 1.3
    assert len(list(training.run(60))) == 1
    training.stragglers.regrouped()
    assert not list(training.run(200))
    training.factors = [1.0, 1.0]  # it has left
    training.stragglers.regrouped()
    assert not list(training.run(60))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(-1, 2**62), st.integers(-1, 2**53)), min_size=3, max_size=3), max_size=60)
)
def test_stragglers_accept_any_numbers(rows: list[list[tuple[int, int]]]) -> None:
    stragglers = Stragglers()
    for iteration, row in enumerate(rows):
        computed = {f"t.{rank}": one for rank, one in enumerate(row)}
        for found in stragglers.add(iteration, iteration * 10**6, computed):
            assert 0 < found.factor <= 10**3
