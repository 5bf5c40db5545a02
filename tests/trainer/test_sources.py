"""Which source is tried first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agents.trainer.lifecycle.candidates import TOLD, Candidate, Kind, newest, ordered, row_of, split

told = st.fixed_dictionaries(
    {kind: st.lists(st.integers(1, 50), max_size=count, unique=True) for kind, count in TOLD.items()}
)


@given(told)
def test_rows_travel(one: dict[Kind, list[int]]) -> None:
    assert {kind: set(found) for kind, found in split(row_of(one)).items()} == {k: set(i) for k, i in one.items()}


@given(st.lists(told, min_size=1, max_size=4))
def test_the_newest_first_and_of_the_same_iteration_the_nearest(all_told: list[dict[Kind, list[int]]]) -> None:
    rows = [row_of(one) for one in all_told]
    order = ordered(rows)
    nearness = {"memory": 0, "peer": 1, "checkpoint": 2}
    keys = [(-one.iteration, nearness[one.kind], one.rank) for one in order]
    assert keys == sorted(keys)
    named = {(i, kind, rank) for rank, one in enumerate(all_told) for kind, found in one.items() for i in found}
    assert {(one.iteration, one.kind, one.rank) for one in order} == named
    assert newest(rows, "checkpoint") == max((i for one in all_told for i in one["checkpoint"]), default=0)


def test_an_example() -> None:
    rows = [row_of({"peer": [7], "checkpoint": [7, 5]}), row_of({"memory": [7, 6]}), row_of({"memory": [8]})]
    assert ordered(rows) == [
        Candidate(8, "memory", 2),
        Candidate(7, "memory", 1),
        Candidate(7, "peer", 0),
        Candidate(7, "checkpoint", 0),
        Candidate(6, "memory", 1),
        Candidate(5, "checkpoint", 0),
    ]
