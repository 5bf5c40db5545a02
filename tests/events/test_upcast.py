"""Messages of an older schema are read as today's, and an old log folds to the same facts (`schema_0.py`)."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.replay.golden import facts
from tests.replay.schema_0 import LOG_0, lower_1_to_0, raise_0_to_1
from unicrond.core.replayer import replay
from unicrond.events.log.segments import read_entries
from unicrond.events.vocabulary import NodeJoined, StoreAddress, WorkerExited
from unicrond.events.wire import upcast as module
from unicrond.events.wire.codec import BadEvent, decode, encode
from unicrond.events.wire.envelope import Envelope, QuarantinedMessage, RecordedEvent
from unicrond.events.wire.upcast import Message, upcast


@pytest.fixture
def schema_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.STEPS, 0, raise_0_to_1)


def joined() -> Envelope:
    event = NodeJoined(
        node="n1",
        address="127.0.0.1",
        slots=3,
        store=StoreAddress(host="127.0.0.1", port=1),
        agent_boot=1,
        version="",
    )
    return Envelope(producer="n1", boot=1, number=1, observed_at_us=1, event=event)


def exited(code: int | None, signal: int | None) -> Envelope:
    event = WorkerExited(node="n1", task="a", worker="a.1", exit_code=code, signal=signal, is_expected=False)
    return Envelope(producer="n1", boot=1, number=2, observed_at_us=1, event=event)


@pytest.mark.usefixtures("schema_0")
@pytest.mark.parametrize("envelope", [joined(), exited(3, None), exited(None, 9)])
def test_upcast_reads_older_message(envelope: Envelope) -> None:
    old = lower_1_to_0(encode(envelope))
    assert old != encode(envelope)
    assert decode(old) == envelope
    assert encode(decode(old)) == encode(envelope)


@pytest.mark.usefixtures("schema_0")
def test_upcast_refuses_nonsense_with_reason() -> None:
    message = msgspec.msgpack.decode(lower_1_to_0(encode(joined())))
    del message["event"]["capacity"]
    with pytest.raises(BadEvent, match=r"cannot upgrade from 0 to 1: KeyError\('capacity'\)"):
        decode(msgspec.msgpack.encode(message))
    with pytest.raises(BadEvent, match=r"slots"):
        decode(msgspec.msgpack.encode({**message, "event": {**message["event"], "capacity": "three"}}))
    with pytest.raises(BadEvent, match=r"cannot upgrade"):
        decode(msgspec.msgpack.encode({**message, "event": 5}))


def test_upcast_refuses_schema_without_step() -> None:
    with pytest.raises(BadEvent, match=r"\$\.schema: 0 is older than this version reads"):
        decode(lower_1_to_0(encode(joined())))


def test_upcast_steps_run_in_order() -> None:
    taken: list[int] = []

    def step(number: int) -> module.Step:
        def take(message: Message) -> Message:
            assert message["schema"] == number
            taken.append(number)
            return message

        return take

    raised = upcast(msgspec.msgpack.encode({"schema": 3}), {n: step(n) for n in range(10)}, 7)
    assert taken == [3, 4, 5, 6]
    assert raised is not None and msgspec.msgpack.decode(raised) == {"schema": 7}
    assert upcast(msgspec.msgpack.encode({"schema": 7}), {}, 7) is None
    assert upcast(b"nonsense", {}, 7) is None


@pytest.mark.usefixtures("schema_0")
def test_golden_log_of_schema_0_folds_to_same_facts() -> None:
    entries = list(read_entries(LOG_0))
    assert not [entry for entry in entries if isinstance(entry, QuarantinedMessage)]
    assert all(entry.envelope.schema == 1 for entry in entries if isinstance(entry, RecordedEvent))
    stored = json.loads(LOG_0.with_suffix(".json").read_text())
    assert json.loads(json.dumps(facts(replay(entries)))) == stored


def test_log_of_unknown_old_schema_is_quarantined() -> None:
    entries = list(read_entries(LOG_0))
    assert entries and all(isinstance(entry, QuarantinedMessage) for entry in entries)
    assert replay(entries).quarantined_messages == len(entries)
