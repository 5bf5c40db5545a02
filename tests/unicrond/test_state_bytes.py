"""Tasks and nodes are cut into parts for people who read the code; in bytes and in JSON they are flat."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import fields

from tests.replay.logs import eventful
from unicrond.core.replayer import replay, steps
from unicrond.core.state.state import DERIVED, Node, Task
from unicrond.core.state.state_bytes import (
    NODE_FIELDS,
    NODE_KEYS,
    TASK_FIELDS,
    TASK_KEYS,
    decode,
    encode,
    from_json,
    to_json,
)


def leaves(owner: type[msgspec.Struct]) -> list[str]:
    """The paths of all fields, through the parts of a task or a node."""
    found = []
    for info in fields(owner):
        part = isinstance(info.type, type) and info.type.__module__.endswith("_parts")
        found += [f"{info.name}.{leaf.name}" for leaf in fields(info.type)] if part else [info.name]
    return found


def test_task_fields_have_unique_names() -> None:
    assert sorted([*TASK_FIELDS, "tally_cache", "lateness_cache"]) == sorted(leaves(Task)) and {
        "tally_cache",
        "lateness_cache",
    } <= {*DERIVED}
    assert len(TASK_FIELDS) == len(set(TASK_KEYS))


def test_every_field_of_a_node_has_a_key_of_its_own() -> None:
    assert sorted(NODE_FIELDS) == sorted(leaves(Node)) and len(NODE_FIELDS) == len(set(NODE_KEYS))


@pytest.mark.parametrize("seed", range(3))
def test_state_survives_bytes_and_json_round_trip(seed: int) -> None:
    for number, (_, _, state) in enumerate(steps(eventful(seed))):
        if number % 41 == 0:
            assert repr(decode(encode(state))) == repr(state), "insertion order included"
            assert repr(from_json(to_json(state))) == repr(state)
            told = msgspec.msgpack.decode(msgspec.msgpack.encode(to_json(state)))
            assert repr(msgspec.msgpack.decode(encode(state))) == repr(told), "a loss may be NaN"


def test_task_fields_keep_their_order() -> None:
    """The golden logs' digests (tests/golden) hold the order itself; this says that nothing sorts it away."""
    state = replay(eventful(1))
    for part, keys in (("tasks", TASK_KEYS), ("nodes", NODE_KEYS)):
        items = to_json(state)[part]
        assert items
        for item in items.values():
            places = [keys.index(name) for name in item]
            assert all(one < other for one, other in pairwise(places))
