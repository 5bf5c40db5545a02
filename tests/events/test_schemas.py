"""Which schema brought what, and how an event is told to who reads an older one.

The vocabulary is held against the frozen lists of schemas (`tests/golden/schema_<n>.json`): whoever adds a type,
a field or a value without saying its schema there goes red here. How an event is lowered is tested with a made-up
schema (`tests/younger.py`).
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given

from tests.golden.schemas import Described, described, frozen
from tests.strategies import EVENT_TYPES, envelopes
from tests.younger import NEXT, younger
from unicrond.events import vocabulary
from unicrond.events.vocabulary import AnyEvent
from unicrond.events.vocabulary.field_defaults import Since
from unicrond.events.wire import schemas
from unicrond.events.wire.codec import decode, encode
from unicrond.events.wire.envelope import Envelope
from unicrond.events.wire.schemas import FIRST, SCHEMA, lowered, schema_of, since, spoken_schema, told_version

NOW = described()


def brought(schema: int) -> Described:
    """What the classes say that came after `schema`: types, "Struct.field", and "Struct.field=value"."""
    found: Described = {"types": set(), "fields": set(), "values": set()}
    for kind in structs_of(AnyEvent):
        if since(kind) > schema:
            found["types"].add(kind.__name__)
        for field in schemas._watched(kind):
            if field.since > schema:
                found["fields"].add(f"{kind.__name__}.{field.name}")
            found["values"] |= {
                f"{kind.__name__}.{field.name}={value}" for value, (n, _) in field.values.items() if n > schema
            }
    return found


def structs_of(hint: Any) -> set[type[msgspec.Struct]]:
    """All structs that events are made of."""
    found: set[type[msgspec.Struct]] = set()
    todo = [hint]
    while todo:
        for part in schemas._parts(todo.pop()):
            if isinstance(part, type) and issubclass(part, msgspec.Struct) and part not in found:
                found.add(part)
                todo += typing.get_type_hints(part, include_extras=True).values()
    return found


def test_schema_number_is_highest_that_any_class_names() -> None:
    kinds = structs_of(AnyEvent)
    fields = [field for kind in kinds for field in schemas._watched(kind)]
    numbers = [since(kind) for kind in kinds] + [field.since for field in fields]
    assert max([*numbers, *(n for field in fields for n, _ in field.values.values())]) == SCHEMA


@pytest.mark.parametrize("schema", range(FIRST, SCHEMA + 1))
def test_additions_since_frozen_schema_name_their_schema(schema: int) -> None:
    old, added = frozen(schema), brought(schema)
    assert not set(old["types"]) - set(NOW["types"]), "a type went; logs hold it"
    missing = sorted(set(NOW["types"]) - set(old["types"]) - added["types"])
    assert not missing, f"let the classes say `since: ClassVar[int] = {SCHEMA + 1}`: {missing}"
    for struct, fields in NOW["structs"].items():
        if struct not in old["structs"]:
            continue  # a new type or value: only a younger field or type can hold it
        gone = set(old["structs"][struct]) - set(fields)
        assert not gone, f"{struct}: the fields {sorted(gone)} went; logs hold them"
        for field, kind in fields.items():
            before, where = old["structs"][struct].get(field), f"{struct}.{field}"
            if before is None:
                assert where in added["fields"], f"{where}: mark it with Since({SCHEMA + 1})"
                assert not kind["required"], f"{where}: a younger field needs a default"
            else:
                _require_no_wider(
                    where, before, kind, {one.rpartition("=")[2] for one in added["values"] if where in one}
                )


def _bounds(kind: Described) -> tuple[float, float]:
    """The least and the greatest that the field may hold, or the length of its text."""
    step = 1 if kind["kind"] == "int" else 1e-9
    low = max(kind.get("ge", -(2**70)), kind.get("gt", -(2**70)) + step, kind.get("min_length", -(2**70)))
    high = min(kind.get("le", 2**70), kind.get("lt", 2**70) - step, kind.get("max_length", 2**70))
    return low, high


def _require_no_wider(where: str, before: Described, now: Described, young: set[str]) -> None:
    """Whatever the field may hold now, readers of the frozen schema take it, but for the `young` values."""
    assert before["kind"] == now["kind"], f"{where}: was {before['kind']}, is {now['kind']}: that needs an upcaster"
    if before["kind"] == "literal":
        extra = set(map(str, now["values"])) - set(map(str, before["values"])) - young
        assert not extra, f"{where}: mark {sorted(extra)} with Since({SCHEMA + 1}, instead=...)"
    (low, high), (low_before, high_before) = _bounds(now), _bounds(before)
    assert low_before <= low and high <= high_before, f"{where}: takes more than readers of the frozen schema do"
    for one, other in zip(before.get("of", ()), now.get("of", ()), strict=True):
        _require_no_wider(where, one, other, young)


@given(envelopes(kinds=EVENT_TYPES))
def test_message_carries_lowest_sufficient_schema(envelope: Envelope) -> None:
    body = encode(envelope)
    assert msgspec.msgpack.decode(body)["schema"] == schema_of(envelope.event)
    assert encode(decode(body)) == body
    assert decode(body).schema == FIRST, "the number concerns the bytes alone"


FIELDS = {
    vocabulary.StopWorker: {"kill": Since(NEXT)},
    vocabulary.TaskSpec: {"seed": Since(NEXT), "run_as": Since(NEXT, is_required=True), "secrets": Since(NEXT)},
    vocabulary.AcceleratorReported: {"kind": Since(NEXT, instead=(("gpu_broken", "gpu_fault"),))},
    vocabulary.CoordinatorStarted: {"severity": Since(NEXT, instead=(("gpu_broken", "gpu_fault"),))},
}


@pytest.fixture
def young() -> Iterator[None]:
    """As if the next schema had brought a type, a field, a nested one, one that is kept, and a value."""
    with younger(vocabulary.DropState, fields=FIELDS):
        yield


@pytest.mark.usefixtures("young")
def test_lowering_drops_replaces_or_withholds_newer_parts() -> None:
    stop = vocabulary.StopWorker(command_id="1.1.n.1", node="n", epoch=1, task="t", worker="t.1", reason="", kill=True)
    assert (schema_of(stop), lowered(stop, NEXT)) == (NEXT, stop)
    assert lowered(stop, FIRST) == msgspec.structs.replace(stop, kill=False)
    assert lowered(vocabulary.DropState(command_id="1.1.n.1", node="n", epoch=1, task="t"), FIRST) is None
    submitted = vocabulary.TaskSubmitted(spec=vocabulary.TaskSpec(name="t", seed=7))
    low = lowered(submitted, FIRST)
    assert low is not None and low.spec == vocabulary.TaskSpec(name="t")
    assert schema_of(low) == FIRST
    saw = vocabulary.AcceleratorReported(node="n", accelerator="0", worker="", kind="gpu_broken", xid=0, message="")
    seen = lowered(saw, FIRST)
    assert seen is not None and seen.kind == "gpu_fault"
    started = vocabulary.CoordinatorStarted(term=1, version="", severity={"gpu_broken": 1, "hang": 2})
    claimed = lowered(started, FIRST)
    assert schema_of(started) == NEXT and claimed is not None and claimed.severity == {"hang": 2}


@pytest.mark.usefixtures("young")
@given(envelopes(kinds=EVENT_TYPES))
def test_lowered_event_holds_only_older_parts(envelope: Envelope) -> None:
    event = lowered(envelope.event, FIRST)
    if isinstance(envelope.event, vocabulary.DropState):
        assert event is None
        return
    assert event is not None
    spec = getattr(event, "spec", None)
    if isinstance(spec, vocabulary.TaskSpec) and spec.run_as:  # is kept, see below
        return
    assert schema_of(event) == FIRST
    if schema_of(envelope.event) == FIRST:
        assert event is envelope.event


def test_version_text_carries_schema() -> None:
    assert told_version("0.2.0", 2) == "0.2.0+schema2"
    assert told_version("0.2.0+1a2b3c4d", 3) == "0.2.0+1a2b3c4d.schema3"
    assert spoken_schema(told_version("0.2.0+1a2b3c4d", 12)) == 12
    for text in ("", "0.1.0", "0.1.0+1a2b3c4d", "unknown", "0.1+schema", "0.1+schema0", "0.1+schema99999999"):
        assert spoken_schema(text) == FIRST


@pytest.mark.usefixtures("young")
def test_lowering_keeps_mandatory_fields() -> None:
    """An agent that does not know who runs the code must refuse the command (tolerance.py), not run it as itself."""
    spec = vocabulary.TaskSpec(name="t", run_as="alice", secrets={"A": "env:A"})
    store = vocabulary.StoreAddress(host="h", port=1)
    start = vocabulary.StartWorker(
        command_id="1.1.n.1", node="n", epoch=1, spec=spec, worker="t.1", replica=0, shard=0, store=store
    )
    low = lowered(start, FIRST)
    assert low is not None
    assert (low.spec.run_as, low.spec.secrets) == ("alice", {})
    assert schema_of(low) == NEXT, "and its readers hear that it is too young for them"
