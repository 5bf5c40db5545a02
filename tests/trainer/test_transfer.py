"""Which tensors of a state travel together."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.states import transfer
from unicrond.agents.trainer.states.transfer import CHUNK_BYTES

sizes_of_tensors = st.lists(st.integers(0, 2 * CHUNK_BYTES) | st.integers(0, 1000), max_size=40)


@given(sizes_of_tensors)
def test_transfer_sends_each_tensor_once_in_few_broadcasts(sizes: list[int]) -> None:
    chunks = list(transfer._chunks(sizes))
    assert [number for chunk in chunks for number in range(len(sizes))[chunk]] == list(range(len(sizes)))
    assert all(sum(sizes[chunk]) <= CHUNK_BYTES or len(sizes[chunk]) == 1 for chunk in chunks)
    assert all(sizes[chunk] for chunk in chunks)
    for before, after in itertools.pairwise(chunks):
        assert sum(sizes[before]) + sizes[after][0] > CHUNK_BYTES
