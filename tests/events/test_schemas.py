"""Which schema brought what, and how an event is told to who reads an older one.

The vocabulary is held against the frozen lists of older schemas (`tests/golden/schema_<n>.json`): whoever adds a type,
a field or a value without saying its schema in `events/schemas.py` goes red here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events import schemas, vocabulary
from events.codec import decode, encode
from events.envelope import Envelope
from events.schemas import FIELDS, FIRST, SCHEMA, TYPES, VALUES, lowered, schema_of, spoken_schema, told_version
from tests.golden.schemas import Described, described, frozen
from tests.strategies import EVENT_TYPES, envelopes

NOW = described()
#: Fields that take more than they did; old readers refuse what is beyond, which takes 146,000 years of worker time.
WIDER = {"FailureRateEstimated.exposed_us"}


def added(schema: int) -> Iterator[str]:
    """What the table says that came after `schema`."""
    for number in range(schema + 1, SCHEMA + 1):
        yield from TYPES.get(number, ())
        for struct, fields in FIELDS.get(number, {}).items():
            yield from (f"{struct}.{field}" for field in fields)
        for alias, values in VALUES.get(number, {}).items():
            yield from (f"{alias}={value}" for value in values)


def test_every_schema_has_its_place_in_the_table() -> None:
    for table in (TYPES, FIELDS, VALUES):
        assert set(table) <= set(range(FIRST + 1, SCHEMA + 1))


@pytest.mark.parametrize("schema", range(FIRST, SCHEMA))
def test_what_an_older_schema_lacks_is_in_the_table(schema: int) -> None:
    old = frozen(schema)
    new_types = set(NOW["types"]) - set(old["types"])
    assert not set(old["types"]) - set(NOW["types"]), "a type went; logs hold it"
    missing = [name for name in sorted(new_types) if name not in added(schema)]
    assert not missing, f"say in events/schemas.py, TYPES, which schema brought {missing}"
    for struct, fields in NOW["structs"].items():
        if struct not in old["structs"]:
            continue  # a new type or value: only a younger field or type can hold it
        gone = set(old["structs"][struct]) - set(fields)
        assert not gone, f"{struct}: the fields {sorted(gone)} went; logs hold them"
        for field, kind in fields.items():
            before = old["structs"][struct].get(field)
            if before is None:
                assert f"{struct}.{field}" in added(schema), (
                    f"say in events/schemas.py, FIELDS, which schema brought {struct}.{field}"
                )
                assert not kind["required"], f"{struct}.{field}: a younger field needs a default"
            else:
                _require_no_wider(f"{struct}.{field}", before, kind, schema)


def _bounds(kind: Described) -> tuple[float, float]:
    """The least and the greatest that the field may hold, or the length of its text."""
    step = 1 if kind["kind"] == "int" else 1e-9
    low = max(kind.get("ge", -(2**70)), kind.get("gt", -(2**70)) + step, kind.get("min_length", -(2**70)))
    high = min(kind.get("le", 2**70), kind.get("lt", 2**70) - step, kind.get("max_length", 2**70))
    return low, high


def _require_no_wider(where: str, before: Described, now: Described, schema: int) -> None:
    """Whatever the field may hold now, readers of `schema` take it, but for the values that the table lists."""
    assert before["kind"] == now["kind"], f"{where}: was {before['kind']}, is {now['kind']}: that needs an upcaster"
    if before["kind"] == "literal":
        young = {
            value for n in range(schema + 1, SCHEMA + 1) for alias in VALUES.get(n, {}).values() for value in alias
        }
        extra = set(map(str, now["values"])) - set(map(str, before["values"])) - young
        assert not extra, f"{where}: say in events/schemas.py, VALUES, which schema brought {sorted(extra)}"
    (low, high), (low_before, high_before) = _bounds(now), _bounds(before)
    assert where in WIDER or (low_before <= low and high <= high_before), (
        f"{where}: takes more than readers of schema {schema} do"
    )
    for one, other in zip(before.get("of", ()), now.get("of", ()), strict=True):
        _require_no_wider(where, one, other, schema)


def test_the_table_names_what_there_is() -> None:
    for names in TYPES.values():
        assert set(names) <= set(NOW["types"])
    for structs in FIELDS.values():
        for struct, fields in structs.items():
            assert set(fields) <= set(NOW["structs"][struct]), struct
    for aliases in VALUES.values():
        for alias, values in aliases.items():
            known = vocabulary.__dict__[alias].__args__
            assert set(values) | set(values.values()) <= set(known), alias


def _fits(value: Any, struct: str, old: Described) -> None:
    """The plain value of a struct holds nothing that the frozen list lacks."""
    fields = old["structs"][struct]
    if isinstance(value, list):  # a bare array, which gets no further field
        assert len(value) == len(fields), struct
        return
    assert set(value) - {"type"} <= set(fields), struct
    for name, held in value.items():
        if name != "type":
            _holds(held, fields[name], old)


def _holds(value: Any, kind: Described, old: Described) -> None:
    if kind["kind"] in old["structs"]:
        _fits(value, kind["kind"], old)
    elif kind["kind"] == "literal":
        assert value in kind["values"]
    elif kind["kind"] == "tuple":
        for item in value:
            _holds(item, kind["of"][0], old)
    elif kind["kind"] == "dict":
        for key, item in value.items():
            _holds(key, kind["of"][0], old)
            _holds(item, kind["of"][1], old)
    elif kind["kind"] == "union" and value is not None:
        for part in kind["of"]:
            if part["kind"] != "none":
                _holds(value, part, old)


@given(envelopes(kinds=EVENT_TYPES), st.integers(FIRST, SCHEMA - 1))
def test_a_lowered_event_holds_nothing_that_its_reader_does_not_know(envelope: Envelope, schema: int) -> None:
    old = frozen(schema)
    event = lowered(envelope.event, schema)
    name = type(envelope.event).__name__
    if name not in old["types"]:
        assert event is None
        return
    assert event is not None
    spec = getattr(envelope.event, "spec", None)
    if isinstance(spec, vocabulary.TaskSpec) and spec.run_as:  # is kept, see below
        return
    wire = msgspec.msgpack.decode(encode(msgspec.structs.replace(envelope, event=event)))
    assert wire["schema"] <= schema
    _fits(wire["event"], name, old)
    if schema_of(envelope.event) <= schema:
        assert event is envelope.event


@given(envelopes(kinds=EVENT_TYPES))
def test_a_message_says_the_lowest_schema_that_holds_it(envelope: Envelope) -> None:
    body = encode(envelope)
    assert msgspec.msgpack.decode(body)["schema"] == schema_of(envelope.event)
    assert encode(decode(body)) == body
    assert decode(body).schema == FIRST, "the number concerns the bytes alone"


@pytest.fixture
def young(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if schema 2 had brought a type, a field, a nested one, and a value."""
    monkeypatch.setattr(schemas, "TYPES", {2: ("DropState",)})
    monkeypatch.setattr(schemas, "FIELDS", {2: {"StopWorker": ("kill",), "TaskSpec": ("seed",)}})
    monkeypatch.setattr(schemas, "VALUES", {2: {"ErrorKind": {"gpu_broken": "gpu_fault"}}})
    schemas._watched.cache_clear()
    yield
    schemas._watched.cache_clear()


@pytest.mark.usefixtures("young")
def test_younger_parts_are_left_out_replaced_or_not_told() -> None:
    stop = vocabulary.StopWorker(command_id="1.1.n.1", node="n", epoch=1, task="t", worker="t.1", reason="", kill=True)
    assert (schema_of(stop), lowered(stop, 2)) == (2, stop)
    assert lowered(stop, 1) == msgspec.structs.replace(stop, kill=False)
    assert lowered(vocabulary.DropState(command_id="1.1.n.1", node="n", epoch=1, task="t"), 1) is None
    submitted = vocabulary.TaskSubmitted(spec=vocabulary.TaskSpec(name="t", seed=7))
    low = lowered(submitted, 1)
    assert low is not None and low.spec == vocabulary.TaskSpec(name="t")
    assert schema_of(low) == 1
    saw = vocabulary.AcceleratorReported(node="n", accelerator="0", worker="", kind="gpu_broken", xid=0, message="")
    seen = lowered(saw, 1)
    assert seen is not None and seen.kind == "gpu_fault"
    started = vocabulary.CoordinatorStarted(term=1, version="", severity={"gpu_broken": 1, "hang": 2})
    claimed = lowered(started, 1)
    assert schema_of(started) == 2 and claimed is not None and claimed.severity == {"hang": 2}


def test_the_schema_stands_where_every_reader_takes_it() -> None:
    assert told_version("0.2.0", 2) == "0.2.0+schema2"
    assert told_version("0.2.0+1a2b3c4d", 3) == "0.2.0+1a2b3c4d.schema3"
    assert spoken_schema(told_version("0.2.0+1a2b3c4d", 12)) == 12
    for text in ("", "0.1.0", "0.1.0+1a2b3c4d", "unknown", "0.1+schema", "0.1+schema0", "0.1+schema99999999"):
        assert spoken_schema(text) == FIRST


def test_who_runs_the_code_is_never_left_out() -> None:
    """An agent that does not know it must refuse the command (tolerance.py), not run the task as itself."""
    spec = vocabulary.TaskSpec(name="t", run_as="alice", secrets={"A": "env:A"})
    store = vocabulary.StoreAddress(host="h", port=1)
    start = vocabulary.StartWorker(
        command_id="1.1.n.1", node="n", epoch=1, spec=spec, worker="t.1", replica=0, shard=0, store=store
    )
    low = lowered(start, 3)
    assert low is not None
    assert (low.spec.run_as, low.spec.secrets) == ("alice", {})
    assert schema_of(low) == SCHEMA, "and its readers hear that it is too young for them"
