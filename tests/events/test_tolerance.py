"""What a newer version says beyond the vocabulary: of a fact the rest is read, an order is refused."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import envelopes
from unicrond.events.log.segment_writer import SegmentWriter
from unicrond.events.log.segments import read_entries
from unicrond.events.log.subjects import entry, subject
from unicrond.events.nats.decode import line
from unicrond.events.vocabulary import (
    AnyObservation,
    CoordinatorStarted,
    DropState,
    NodeJoined,
    StoreAddress,
    TaskSpec,
    TaskSubmitted,
    WorkerExited,
)
from unicrond.events.wire.codec import BadEvent, body_of, decode, encode, read
from unicrond.events.wire.envelope import Envelope, QuarantinedMessage, RecordedEvent
from unicrond.events.wire.schemas import SCHEMA

OBSERVATIONS = typing.get_args(AnyObservation)


def said(event: Any, producer: str = "n1", term: int = 0) -> Envelope:
    return Envelope(producer=producer, boot=1, number=1, term=term, observed_at_us=1, event=event)


JOINED = said(
    NodeJoined(
        node="n1", address="10.0.0.1", slots=3, store=StoreAddress(host="h", port=1), agent_boot=1, version="9.0"
    )
)
EXITED = said(WorkerExited(node="n1", task="t", worker="t.1", exit_code=1, signal=None, is_expected=False))


def with_more(envelope: Envelope, schema: int = SCHEMA + 1, **more: Any) -> bytes:
    """The envelope's bytes with more fields in the event, as a newer version would write it."""
    wire = msgpack.unpackb(encode(envelope))
    wire["schema"] = schema
    wire["event"].update(more)
    return typing.cast(bytes, msgpack.packb(wire))


@pytest.mark.parametrize("schema", [1, SCHEMA, SCHEMA + 1])
@pytest.mark.parametrize("envelope", [JOINED, EXITED])
def test_fact_with_unknown_field_is_read(envelope: Envelope, schema: int) -> None:
    body = with_more(envelope, schema, rack="r7", disks=[{"size": 5}])
    found, unknown = read(body)
    assert found == envelope
    assert unknown == ("$.event.rack = 'r7'", "$.event.disks = [{'size': 5}]")
    assert decode(body) == envelope


def test_unknown_nested_fields_are_set_aside() -> None:
    submitted = said(TaskSubmitted(spec=TaskSpec(name="t", seed=7)), "api")
    wire = msgpack.unpackb(encode(submitted))
    wire["event"]["spec"]["urgency"] = 3
    wire["event"]["spec"]["model"]["experts"] = 8
    found, unknown = read(msgpack.packb(wire))
    assert found == submitted
    assert set(unknown) == {
        "$.event.spec.urgency = 3",
        "$.event.spec.model.experts = 8",
    }


@given(envelopes(kinds=OBSERVATIONS), st.integers(1, SCHEMA + 3))
def test_observation_of_each_kind_accepts_unknown_field(envelope: Envelope, schema: int) -> None:
    found, unknown = read(with_more(envelope, schema, from_the_future=True))
    assert unknown == ("$.event.from_the_future = True",)
    assert encode(found) == encode(envelope)


def test_newer_schema_number_alone_refuses_no_fact() -> None:
    assert read(with_more(EXITED, SCHEMA + 5)) == (EXITED, ())


def test_known_fields_stay_strict() -> None:
    for wrong in ({"task": 5}, {"task": "a.b"}, {"node": "n2"}, {"exit_code": None}):
        with pytest.raises(BadEvent):
            decode(with_more(EXITED, **{"rack": "r7", **wrong}))
    wire = msgpack.unpackb(with_more(EXITED, rack="r7"))
    with pytest.raises(BadEvent, match="surprise"):
        decode(msgpack.packb({**wire, "surprise": 1}))


def test_commands_and_decisions_refuse_unknown_fields() -> None:
    drop = said(DropState(command_id="1.1.n1.1", node="n1", epoch=1, task="t"), "coordinator", term=1)
    started = said(CoordinatorStarted(term=1, version="x"), "coordinator", term=1)
    for envelope in (drop, started):
        for schema in (1, SCHEMA, SCHEMA + 1):
            with pytest.raises(BadEvent, match=r"urgency|schema"):
                decode(with_more(envelope, schema, urgency=1))


def test_log_keeps_original_bytes(tmp_path: Path) -> None:
    body = with_more(EXITED, rack="r7")
    found = entry(1, 5, subject(EXITED), body)
    assert found == RecordedEvent(1, 5, EXITED, body)
    writer = SegmentWriter(tmp_path)
    writer.repair()
    writer.write([found, RecordedEvent(2, 6, JOINED)])
    writer.close()
    kept = list(read_entries(tmp_path))
    assert kept == [found, RecordedEvent(2, 6, JOINED)]
    assert isinstance(kept[0], RecordedEvent) and body_of(kept[0]) == body
    assert isinstance(entry(1, 5, subject(JOINED), body), QuarantinedMessage), "the subject is compared as ever"


def test_events_decode_shows_unknown_fields() -> None:
    assert line(with_more(EXITED, rack="r7")).endswith("[unknown to this version: $.event.rack = 'r7']")
    assert "unknown here" not in line(encode(EXITED))
    assert msgspec.json.decode(line(with_more(EXITED, rack="r7"), as_json=True))["event"]["rack"] == "r7"
