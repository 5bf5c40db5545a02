"""Events as the HTTP API sends them (server-sent events), and as lines for people. No I/O."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any, get_args

import msgspec

from unicrond.events.vocabulary import AnyEvent
from unicrond.events.vocabulary.phrases import clean
from unicrond.events.wire.envelope import Entry, Envelope, QuarantinedMessage, RecordedEvent

#: The types of events that a watching person wants to see; the others are internal steps.
NOTEWORTHY = frozenset({"QuarantinedMessage", *(kind.__name__ for kind in get_args(AnyEvent) if kind.is_noteworthy)})

#: Numbers of events that may be NaN, which JSON writes as null.
_MAY_BE_NAN = ("loss", "value", "usual")

#: An event is at most 768 KiB of msgpack; as JSON it is not much longer.
LINE_BYTES_MAX = 4 * 1024 * 1024


def entry_json(entry: Entry) -> dict[str, Any]:
    """Return the entry as plain JSON types, with its summary."""
    if isinstance(entry, QuarantinedMessage):
        return {"seq": entry.seq, "recorded_at_us": entry.recorded_at_us, "quarantined": entry.reason}
    return {
        "seq": entry.seq,
        "recorded_at_us": entry.recorded_at_us,
        "summary": entry.envelope.event.sentence(),
        "envelope": msgspec.to_builtins(entry.envelope),
    }


def entry_of(line: EventLine) -> Entry:
    """Rebuild the entry from the line that `entry_json` made of it: what the API hides stays hidden, and an infinite
    loss becomes NaN. Raise BadEventStream."""
    if line.quarantined:
        return QuarantinedMessage(line.seq, line.recorded_at_us, "", line.quarantined, 0)
    event = line.envelope.get("event")
    if isinstance(event, dict):
        event = event | {name: math.nan for name in _MAY_BE_NAN if name in event and event[name] is None}
    try:
        envelope = msgspec.convert({**line.envelope, "event": event}, Envelope, strict=True)
    except msgspec.ValidationError as error:
        raise BadEventStream(f"entry {line.seq}: {clean(str(error))}") from None
    return RecordedEvent(line.seq, line.recorded_at_us, envelope)


class BadEventStream(ValueError):
    """The answer is not an event stream of a coordinator."""


class EventLine(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log. `quarantined`: why it is not an event, or ""; then `summary` and `envelope` are empty."""

    seq: int
    recorded_at_us: int
    type: str
    summary: str = ""
    quarantined: str = ""
    envelope: dict[str, Any] = {}

    @property
    def noteworthy(self) -> bool:
        """Return whether the event gets a line in the live view. The ordered end of a worker does not."""
        expected = self.type == "WorkerExited" and self.envelope.get("event", {}).get("is_expected") is True
        return self.type in NOTEWORTHY and not expected

    @property
    def text(self) -> str:
        """Return the event's summary on one line."""
        return clean(f"not a valid event: {self.quarantined}" if self.quarantined else self.summary)

    def clock(self, timespec: str = "seconds") -> str:
        """Return the log's receive time, local. `timespec` as in datetime.isoformat."""
        return datetime.fromtimestamp(self.recorded_at_us / 1e6).time().isoformat(timespec)


class EventStreamParser:
    """Parser of the part of the server-sent events format that the API uses: bytes in, events out."""

    def __init__(self) -> None:
        self._rest = b""
        self._type = ""
        self._data = ""

    def feed(self, chunk: bytes) -> Iterator[EventLine]:
        """Yield the events that `chunk` completes. Raise BadEventStream; the unread rest of the chunk is lost then."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = b""
        for line in lines:
            event = self._line(line.decode(errors="replace").removesuffix("\r"))
            if event is not None:
                yield event
        if len(rest) > LINE_BYTES_MAX:
            raise BadEventStream(f"a line of more than {LINE_BYTES_MAX} bytes")
        self._rest = rest

    def _line(self, line: str) -> EventLine | None:
        """Take in a field of the current event, or return the event at the empty line that ends it."""
        if line:
            field, _, value = line.partition(":")
            if field == "event":
                self._type = value.strip()
            elif field == "data":
                self._data = value
            return None
        kind, data = self._type, self._data
        self._type = self._data = ""
        if not data:
            return None
        try:
            # json reads NaN, which a loss may be; msgspec's own decoder does not.
            return msgspec.convert({"type": kind, **json.loads(data)}, EventLine, strict=True)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadEventStream(f"cannot read it: {clean(str(error))}") from None
