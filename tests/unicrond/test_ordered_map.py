"""Maps that change at the cost of the change are maps like any other; so is what is carried along with them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.seeds import at_most
from unicrond.core.state import ordered_map
from unicrond.core.state.ordered_map import (
    OrderedMap,
    changed,
    in_order,
    newest,
    ordered,
    put,
    put_all,
    same_names,
    without,
)

NAMES = st.integers(0, 400).map("t.{}".format)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "without", "many"]), st.lists(NAMES, min_size=1, max_size=90)))


def play(steps: list[tuple[str, list[str]]]) -> list[tuple[Any, dict[str, object]]]:
    """The map and a plain dict after each step."""
    known: Any = {}
    model: dict[str, object] = {}
    seen = [(known, dict(model))]
    for what, names in steps:
        if what == "without":
            known = without(known, names)
            model = {name: value for name, value in model.items() if name not in names}
        elif what == "put":
            value = object()
            known, model = put(known, names[0], value), model | {names[0]: value}
        else:
            values = {name: object() for name in names}
            known, model = put_all(known, values), model | values
        seen.append((known, dict(model)))
    return seen


@settings(max_examples=at_most(150), deadline=None)
@given(STEPS)
def test_ordered_map_matches_dict_in_insertion_order(steps: list[tuple[str, list[str]]]) -> None:
    for known, model in play(steps):
        assert known == model and model == known
        assert len(known) == len(model)
        assert list(known) == list(model) == list(known.keys())
        assert list(known.items()) == list(model.items())
        assert list(known.values()) == list(model.values())
        assert list(reversed(known)) == list(reversed(model))
        assert list(newest(known, 3)) == list(reversed(model.values()))[:3]
        some = list(model)[::7]
        assert in_order(known, some[::-1]) == some
        for name in ["t.1", "t.400", "else"]:
            assert known.get(name) is model.get(name) and (name in known) == (name in model)


@settings(max_examples=at_most(150), deadline=None)
@given(STEPS)
def test_changed_finds_all_differences(steps: list[tuple[str, list[str]]]) -> None:
    seen = play(steps)
    for first, (before, was) in enumerate(seen):
        for after, now in seen[first : first + 4]:
            names = {*was, *now}
            expected = {n: (was.get(n), now.get(n)) for n in names if was.get(n) is not now.get(n)}
            assert changed(before, after) == expected
            if same_names(before, after):
                assert was.keys() == now.keys()


def test_ordered_map_is_immutable() -> None:
    before = ordered({f"n{number}": number for number in range(1000)})
    assert isinstance(before, OrderedMap)
    after = put(without(before, ["n5", "n999"]), "n7", -7)
    assert before["n7"] == 7 and "n5" in before and len(before) == 1000
    assert after["n7"] == -7 and "n5" not in after and len(after) == 998
    with pytest.raises(KeyError):
        after["n5"]


def test_ordered_map_copies_one_chunk_per_change() -> None:
    before: Any = ordered({f"n{number}": number for number in range(10_000)})
    after: Any = put(before, "n5000", -1)
    unshared = [one is not other for one, other in zip(before._chunks, after._chunks, strict=True)]
    assert sum(unshared) == 1 and same_names(before, after)


def test_ordered_map_drops_empty_chunks() -> None:
    known: Any = ordered({f"n{number}": number for number in range(1000)})
    for number in range(1000, 20_000):
        known = without(put(known, f"n{number}", number), [f"n{number - 1000}"])
    assert len(known) == 1000 and list(known) == [f"n{number}" for number in range(19_000, 20_000)]
    assert len(known._chunks) * ordered_map.CHUNK <= 4 * 1000 + 9 * ordered_map.CHUNK
