"""Samples: pure, none twice within an epoch, and the digest that stands in the log."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.protocol.sampling import Sampling, sample_hash, samples_digest, work_seed


@given(st.integers(0, 2**31), st.integers(1, 120), st.integers(1, 4), st.integers(1, 4))
def test_epoch_uses_every_sample_once(seed: int, size: int, micro_batch: int, micro_batches: int) -> None:
    sampling = Sampling(seed, micro_batch * micro_batches, micro_batch, size)
    used: list[int] = []
    iteration = 0
    while len(used) < size:
        iteration += 1
        used += [sample for m in range(micro_batches) for sample in sampling.samples(iteration, m)]
    assert sorted(used[:size]) == list(range(size))


def test_sampling_without_data_set_uses_positions() -> None:
    sampling = Sampling(1, 6, 2, None)
    assert [sampling.samples(2, m) for m in range(3)] == [(6, 7), (8, 9), (10, 11)]


def test_sample_hash_and_digest_match_documentation() -> None:
    expected = int.from_bytes(blake2b(b"3:5", digest_size=8).digest(), "big") % 2**61
    assert sample_hash(3, 5) == expected
    assert samples_digest(3, [5, 5]) == 2 * expected % 2**61


def test_seed_depends_on_work_not_worker() -> None:
    seeds = {work_seed(seed, iteration, m) for seed in (1, 2) for iteration in (1, 2) for m in (0, 1)}
    assert len(seeds) == 8 and all(0 <= seed < 2**62 for seed in seeds)


@pytest.mark.parametrize(("fields", "named"), [((1, 8, 3, 100), "global_batch"), ((1, 8, 2, 0), "dataset_size")])
def test_sampling_refuses_impossible_fields(fields: tuple[int, int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sampling(*fields)
