"""Losses and gradient norms that stand out, and parameters that differ."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.detection.checksum import checksum, minority_ranks
from unicrond.agents.trainer.detection.spikes import ENOUGH, QUIET, Spike, Spikes


def seasoned(ranks: int = 3, usual: float = 2.0, noise: float = 0.05) -> Spikes:
    spikes, draw = Spikes(rise=1.0), random.Random(7)
    for _ in range(ENOUGH + 5):
        assert spikes.check([usual * (1 + draw.uniform(-noise, noise)) for _ in range(ranks)]) == []
    return spikes


@pytest.mark.parametrize("value", [9.0, math.inf, math.nan, 1e30])
def test_spike_names_its_rank(value: float) -> None:
    (spike,) = seasoned().check([2.0, value, 2.1])
    assert spike.rank == 1 and spike.usual == pytest.approx(2.0, rel=0.05)
    assert spike.value == value or math.isnan(value)


def test_spikes_name_two_of_three_ranks() -> None:
    assert [spike.rank for spike in seasoned().check([9.0, 2.0, 9.5])] == [0, 2]


def test_spike_of_all_ranks_names_none() -> None:
    assert [spike.rank for spike in seasoned().check([9.0, 9.1, 9.2])] == [None]


def test_spike_of_single_replica_names_it() -> None:
    assert [spike.rank for spike in seasoned(ranks=1).check([9.0])] == [0]


def test_repeated_spike_is_reported_after_pause() -> None:
    spikes = seasoned()
    told = [bool(spikes.check([2.0, 9.0, 2.0])) for _ in range(2 * QUIET)]
    assert [number for number, one in enumerate(told) if one] == [0, QUIET]


def test_value_below_usual_is_no_spike() -> None:
    assert seasoned().check([0.01, 2.0, 2.0]) == []


def test_spikes_need_enough_history() -> None:
    spikes = Spikes(rise=1.0)
    assert all(spikes.check([float(number)]) == [] for number in range(ENOUGH))


def test_noisy_falling_loss_never_spikes() -> None:
    for seed in range(20):
        spikes, draw = Spikes(rise=1.0), random.Random(seed)
        for iteration in range(400):
            mean = 2 + 4 * math.exp(-iteration / 60)
            assert spikes.check([mean * draw.uniform(0.8, 1.25) for _ in range(3)]) == [], (seed, iteration)


@given(st.lists(st.lists(st.floats(), min_size=2, max_size=2), max_size=60))
def test_spikes_accept_any_numbers(rows: list[list[float]]) -> None:
    spikes = Spikes(rise=1.0)
    for row in rows:
        assert all(isinstance(spike, Spike) for spike in spikes.check(row))


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_checksum_detects_any_single_bit(dtype: torch.dtype) -> None:
    parameters = [torch.randn(17, 5).to(dtype), torch.randn(3).to(dtype)]
    before = checksum(parameters)
    assert before == checksum([parameter.clone() for parameter in parameters])
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameters[0].element_size()]
    for place in (0, 84):
        parameters[0].view(integers).view(-1)[place] ^= 1
        assert checksum(parameters) != before
        parameters[0].view(integers).view(-1)[place] ^= 1
    assert checksum(parameters) == before
    assert checksum([parameters[0]]) != checksum([parameters[0], parameters[1]])


def test_checksum_is_positive_row_value() -> None:
    ones = torch.full((64,), -1, dtype=torch.int64).view(torch.float64)
    for parameters in ([], [torch.zeros(0)], [torch.zeros(4)], [ones]):
        assert 0 < checksum(parameters) < 2**62


@pytest.mark.parametrize(
    ("checksums", "odd"),
    [
        ([5, 5, 5], ()),
        ([5, 7, 5], (1,)),
        ([7, 5, 5, 8, 5], (0, 3)),
        ([5, 7], None),
        ([5, 7, 8], None),
        ([5, 5, 7, 7], None),
        ([5], ()),
    ],
)
def test_minority_ranks_differ_from_majority(checksums: list[int], odd: tuple[int, ...] | None) -> None:
    assert minority_ranks(checksums) == odd
