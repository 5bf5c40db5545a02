"""An entry that went through the API is the entry; what it hides is hidden in it."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from tests.replay.logs import eventful
from unicrond.display.event_lines import BadEventStream, EventLine, entry_json, entry_of
from unicrond.events.vocabulary import StepCommitted, TaskSpec, TaskSubmitted
from unicrond.events.wire.envelope import Envelope, QuarantinedMessage, RecordedEvent
from unicrond.service.api.redaction import Discretion


def through(entry: object) -> EventLine:
    shown = Discretion()
    shown.see(entry)  # type: ignore[arg-type]
    data = msgspec.json.encode(shown.plain(entry_json(entry))).decode()  # type: ignore[arg-type]
    kind = "QuarantinedMessage" if isinstance(entry, QuarantinedMessage) else type(entry.envelope.event).__name__  # type: ignore[attr-defined]
    return msgspec.convert({"type": kind, **json.loads(data)}, EventLine, strict=True)


def test_api_entry_restores_every_event_type() -> None:
    entries = eventful(3)
    tokens = 0
    for entry in entries:
        back = entry_of(through(entry))
        if isinstance(entry, QuarantinedMessage):
            assert isinstance(back, QuarantinedMessage) and (back.seq, back.reason) == (entry.seq, entry.reason)
            continue
        assert isinstance(back, RecordedEvent) and back.seq == entry.seq
        was, now = msgspec.to_builtins(entry.envelope), msgspec.to_builtins(back.envelope)
        tokens += was != now
        assert Discretion().plain(was) == Discretion().plain(now) or _is_infinite(was)
    assert tokens < len(entries)


def _is_infinite(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_is_infinite, value.values()))
    return isinstance(value, float) and not math.isfinite(value)


def _recorded(event: object) -> RecordedEvent:
    envelope = Envelope(producer="n1", boot=1, number=1, observed_at_us=1, event=event)  # type: ignore[arg-type]
    return RecordedEvent(7, 9, envelope)


def test_api_entry_keeps_nan_loss() -> None:
    step = StepCommitted(
        node="n1", task="a", worker="a.1", generation=1, first=1, last=1, samples=1, samples_digest=0,
        loss=math.nan, duration_us=1, micro_batches_by_rank=(1,),
    )  # fmt: skip
    back = entry_of(through(_recorded(step)))
    assert isinstance(back, RecordedEvent) and isinstance(back.envelope.event, StepCommitted)
    assert math.isnan(back.envelope.event.loss)


def test_api_entry_keeps_secret_hidden() -> None:
    submitted = TaskSubmitted(spec=TaskSpec(name="a", env={"HF_TOKEN": "hf_secret", "LEVEL": "1"}))
    line = through(_recorded(submitted))
    back = entry_of(line)
    assert isinstance(back, RecordedEvent) and isinstance(back.envelope.event, TaskSubmitted)
    env = back.envelope.event.spec.env
    assert env["LEVEL"] == "1" and env["HF_TOKEN"] not in ("", "hf_secret")


def test_api_entry_refuses_unknown_field() -> None:
    line = through(_recorded(TaskSubmitted(spec=TaskSpec(name="a"))))
    strange = msgspec.structs.replace(line, envelope={**line.envelope, "new": 1})
    with pytest.raises(BadEventStream, match=r"entry 7: .*new"):
        entry_of(strange)
