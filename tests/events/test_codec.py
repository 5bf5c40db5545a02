"""The codec is strict and total: what comes back is what was written, and bad bytes give BadEvent alone."""

from __future__ import annotations

import math
import typing
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.strategies import EVENT_TYPES, envelopes
from unicrond.events.vocabulary import (
    CoordinatorStarted,
    ErrorReported,
    NodeJoined,
    OptimizerSpec,
    StepCommitted,
    StopWorker,
    StoreAddress,
    TaskSpec,
    TaskSubmitted,
    WorkerExited,
    WorkerReady,
)
from unicrond.events.wire.codec import MAX_EVENT_BYTES, BadEvent, check, decode, encode
from unicrond.events.wire.envelope import Envelope
from unicrond.events.wire.schemas import SCHEMA

READY = Envelope(
    producer="n1", boot=1, number=7, observed_at_us=5, event=WorkerReady(node="n1", task="t", worker="t.1")
)


def changed(**fields: Any) -> bytes:
    """READY on the wire, with fields of the envelope or ("event.<field>") the event changed; ... removes one."""
    wire: dict[str, Any] = msgpack.unpackb(encode(READY))
    for path, value in fields.items():
        part, _, key = path.rpartition("__")
        target = wire[part] if part else wire
        if value is ...:
            del target[key]
        else:
            target[key] = value
    return typing.cast(bytes, msgpack.packb(wire))


@given(envelopes(kinds=EVENT_TYPES))
def test_codec_round_trip_keeps_bytes(envelope: Envelope) -> None:
    body = encode(envelope)
    # Compared as bytes, since a NaN loss differs from itself; equal envelopes have equal bytes.
    assert encode(decode(body)) == body
    assert isinstance(msgpack.unpackb(body), dict), "the wire is plain msgpack"


def test_equal_envelopes_have_equal_bytes() -> None:
    one, other = (
        msgspec.structs.replace(READY, producer="api", event=TaskSubmitted(spec=TaskSpec(name="t", env=env)))
        for env in ({"A": "1", "B": "2"}, {"B": "2", "A": "1"})
    )
    assert one == other
    assert encode(one) == encode(other)


@given(st.binary(max_size=300))
@example(b"\x91" * 100_000)
@example(b"\x81\xa5event" * 20_000)
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
def test_codec_refuses_arbitrary_bytes(body: bytes) -> None:
    with pytest.raises(BadEvent):
        decode(body)


@given(envelopes(kinds=EVENT_TYPES), st.data())
def test_codec_survives_mutated_bytes(envelope: Envelope, data: st.DataObject) -> None:
    body = bytearray(encode(envelope))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        how = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if how == "flip":
            body[at] ^= data.draw(st.integers(1, 255))
        elif how == "cut" and len(body) > 1:
            del body[at]
        else:
            body.insert(at, data.draw(st.integers(0, 255)))
    try:
        survivor = decode(bytes(body))
    except BadEvent as error:
        assert error.reason
        assert "\n" not in error.reason
    else:
        encode(survivor)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (changed(event__node=5), "$.event.node"),
        (changed(event__node="a.b"), "$.event.node"),
        (changed(event__node="n1\n"), "$.event.node"),
        (changed(event__node="n2"), "$.event.node"),
        (changed(event__worker="t1"), "$.event.worker"),
        (changed(event__task=...), "task"),
        (changed(event__type="Nonsense"), "$.event.type"),
        (changed(event=None), "$.event"),
        (changed(boot=-1), "$.boot"),
        (changed(boot=True), "$.boot"),
        (changed(boot="1"), "$.boot"),
        (changed(boot=2**53), "$.boot"),
        (changed(number=0), "$.number"),
        (changed(schema=0), "$.schema"),
        (changed(schema=SCHEMA + 1, event__type="FromTheFuture"), "$.schema"),
        (changed(schema=SCHEMA + 1, event__task=...), "task"),
        (changed(producer=...), "producer"),
        (changed(surprise=1), "surprise"),
        (changed(term=3), "$.term"),
        (changed(observed_at_us=1.5), "$.observed_at_us"),
        (encode(READY) + b"\0", "trailing"),
        (b"", "truncated"),
        (b"\0" * (MAX_EVENT_BYTES + 1), "bytes long"),
    ],
)
def test_refusal_names_field(body: bytes, names: str) -> None:
    with pytest.raises(BadEvent, match=names.replace("$", r"\$")):
        decode(body)


def exited(exit_code: int | None, signal: int | None) -> Envelope:
    event = WorkerExited(node="n1", task="t", worker="t.1", exit_code=exit_code, signal=signal, is_expected=False)
    return msgspec.structs.replace(READY, event=event)


def test_exit_has_exactly_one_cause() -> None:
    check(exited(0, None))
    check(exited(None, 9))
    for both_or_none in (exited(None, None), exited(1, 9)):
        with pytest.raises(BadEvent, match="exactly one of exit_code and signal"):
            encode(both_or_none)


def test_decisions_and_commands_need_their_term() -> None:
    started = Envelope(
        producer="coordinator",
        boot=1,
        number=1,
        term=2,
        observed_at_us=1,
        event=CoordinatorStarted(term=2, version="1"),
    )
    check(started)
    for term in (0, 3):
        with pytest.raises(BadEvent, match=r"\$\..*term"):
            encode(msgspec.structs.replace(started, term=term))
    stop = StopWorker(command_id="2.5.n1.0", node="n1", epoch=5, task="t", worker="t.1", reason="")
    check(msgspec.structs.replace(started, event=stop))
    for command_id in ("2.5.n2.0", "1.5.n1.0", "2.5.n1.", "2.5.n1.x", "nonsense"):
        with pytest.raises(BadEvent, match="command_id"):
            encode(msgspec.structs.replace(started, event=msgspec.structs.replace(stop, command_id=command_id)))


def test_task_submission_comes_only_from_api() -> None:
    submitted = msgspec.structs.replace(READY, producer="api", event=TaskSubmitted(spec=TaskSpec(name="t")))
    check(submitted)
    with pytest.raises(BadEvent, match=r"\$\.producer"):
        encode(msgspec.structs.replace(submitted, producer="n1"))
    joined = NodeJoined(node="api", address="", slots=1, store=StoreAddress(host="", port=1), agent_boot=1, version="1")
    with pytest.raises(BadEvent, match="not a node's name"):
        encode(msgspec.structs.replace(READY, producer="api", event=joined))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_codec_accepts_nan_loss_but_no_nan_setting(value: float) -> None:
    committed = StepCommitted(
        node="n1", task="t", worker="t.1", generation=1, first=1, last=1, samples=1, samples_digest=1,
        loss=value, duration_us=1, micro_batches_by_rank=(1,),
    )  # fmt: skip
    body = encode(msgspec.structs.replace(READY, event=committed))
    event = decode(body).event
    assert isinstance(event, StepCommitted)
    assert math.isnan(event.loss) == math.isnan(value)
    for spec in (TaskSpec(name="t", weight=value), TaskSpec(name="t", optimizer=OptimizerSpec(lr=value))):
        with pytest.raises(BadEvent, match=r"\$\.event\.spec\.(weight|optimizer.lr)"):
            encode(msgspec.structs.replace(READY, producer="api", event=TaskSubmitted(spec=spec)))


def test_codec_refuses_oversized_events() -> None:
    long = ErrorReported(
        node="n1", task="t", worker="t.1", kind="exception", generation=1, iteration=1, phase="start",
        message="x" * 1025,
    )  # fmt: skip
    with pytest.raises(BadEvent, match=r"\$\.event\.message"):
        encode(msgspec.structs.replace(READY, event=long))
    with pytest.raises(BadEvent, match="surrogates"):
        encode(msgspec.structs.replace(READY, caused_by="\ud800"))
    with pytest.raises(BadEvent, match="cannot be encoded"):
        encode(msgspec.structs.replace(READY, boot=2**70))
    huge = TaskSpec(name="t", args=("y" * 1024,) * (1 + MAX_EVENT_BYTES // 1024))
    with pytest.raises(BadEvent, match=f"more than the {MAX_EVENT_BYTES} allowed"):
        encode(msgspec.structs.replace(READY, producer="api", event=TaskSubmitted(spec=huge)))
