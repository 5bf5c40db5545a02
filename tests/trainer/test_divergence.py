"""What a difference between replicas means: a replica's fault, or the program's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.detection.checksum import digest
from unicrond.agents.trainer.detection.divergence import (
    NEWCOMER_ITERATIONS,
    ReplicaDifference,
    gradients_number,
    judge_gradients,
    judge_parameters,
)

RANKS = st.integers(3, 12)


def number(norm: float, bits: int = 7) -> int:
    return gradients_number(bits, norm)


@given(RANKS, st.data())
def test_odd_replicas_are_those_that_the_majority_is_not(replicas: int, data: st.DataObject) -> None:
    odd = data.draw(st.sets(st.integers(0, replicas - 1), min_size=1, max_size=(replicas - 1) // 2))
    checksums = [100 + rank if rank in odd else 5 for rank in range(replicas)]
    assert judge_parameters(checksums, (), 9) == ReplicaDifference(odd=tuple(sorted(odd)))
    rows = [[number(2.0 + rank)] * 2 if rank in odd else [number(1.0)] * 2 for rank in range(replicas)]
    assert judge_gradients(rows) == ReplicaDifference(odd=tuple(sorted(odd)))
    unsteady = [[number(1.0), number(2.0 + rank)] if rank in odd else [number(1.0)] * 2 for rank in range(replicas)]
    assert judge_gradients(unsteady) == ReplicaDifference(odd=tuple(sorted(odd))), "steady nowhere: nobody confirms it"


@given(st.lists(st.integers(1, 3), min_size=2, max_size=9), st.sets(st.integers(0, 8)), st.integers(0, 20))
def test_no_majority_accuses_nobody(checksums: list[int], newcomers: set[int], agreements: int) -> None:
    """Whatever the numbers: those who are accused are fewer than half, and a program that diverges accuses nobody."""
    difference = judge_parameters(checksums, newcomers, agreements)
    assert 2 * len(difference.odd) < len(checksums)
    assert difference.sign is None or not difference.odd
    if all(checksums.count(one) * 2 <= len(checksums) for one in checksums):
        assert difference.sign is not None
    assert judge_parameters([*checksums, 0], newcomers, agreements) == ReplicaDifference(), "a hook of before made none"


@pytest.mark.parametrize(
    ("agreements", "difference"),
    [
        (0, ReplicaDifference(odd=(2,))),
        (1, ReplicaDifference("newcomer")),
        (NEWCOMER_ITERATIONS, ReplicaDifference("newcomer")),
        (NEWCOMER_ITERATIONS + 1, ReplicaDifference(odd=(2,))),
    ],
)
def test_newcomer_that_was_the_same_and_differs_soon_is_the_programs(
    agreements: int, difference: ReplicaDifference
) -> None:
    assert judge_parameters([5, 5, 6], {2}, agreements) == difference
    assert judge_parameters([5, 6], {1}, agreements).sign == (difference.sign or "parameters")
    assert judge_parameters([6, 5, 5], {2}, agreements) == ReplicaDifference(odd=(0,)), (
        "the settled ones differ themselves"
    )


@pytest.mark.parametrize(
    ("rows", "sign"),
    [
        ([[1.0, 2.0]], "unsteady"),
        ([[1.0, 2.0], [3.0, 4.0]], "unsteady"),
        ([[1.0, 1.0], [1.0, 2.0]], "unsteady"),
        ([[1.0, 1.0], [2.0, 2.0]], "unequal"),
        ([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], "unequal"),
        ([[1.0, 1.0], [1.0001, 1.0001]], None),
        ([[1.0, 1.0002], [1.0001, 1.0]], None),
        ([[1.0, 1.0], [float("inf"), float("inf")]], "unequal"),
        ([[float("nan"), 1.0], [2.0, 3.0]], None),
    ],
)
def test_gradients_that_nobody_confirms_are_the_programs(rows: list[list[float]], sign: str | None) -> None:
    numbers = [[number(norm, bits=3 * rank + row.index(norm)) for norm in row] for rank, row in enumerate(rows)]
    assert judge_gradients(numbers) == ReplicaDifference(sign)  # type: ignore[arg-type]


def test_numbers_of_older_hooks_are_not_judged() -> None:
    assert judge_gradients([[5, 5], [number(1.0), number(2.0)]]) == ReplicaDifference()
    assert judge_gradients([[number(1.0)] * 2] * 3) == ReplicaDifference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_digest_sees_any_single_bit(dtype: torch.dtype, size: int) -> None:
    parameters = [torch.zeros(size, dtype=dtype), torch.ones(5), torch.ones(9)[1:]]
    before = digest(parameters)
    assert before == digest([parameter.clone() for parameter in parameters]) and 0 < before < 2**62
    for parameter in parameters:
        bytes_of = parameter.view(torch.uint8)
        for place in range(bytes_of.numel()):
            for bit in (0, 7):
                bytes_of[place] ^= 1 << bit
                assert digest(parameters) != before
                bytes_of[place] ^= 1 << bit
    assert digest(parameters) == before
    assert digest(parameters[:1]) != digest([parameters[0], parameters[1]])
