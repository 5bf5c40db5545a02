"""Points of a log: a sequence number, a time, or a span before the log's end.

Rules
-----
* A point cuts the log in two: the prefix that it covers, and the rest. Nothing is ever left out in between.
* Time is the log's, a running maximum (as in the fold): a point in time covers everything before the first
  entry that was recorded later. So "up to T" and "after T" share a log without overlap, whatever the clock did.
* "10m" (or "-10m") counts from the newest entry, not from now: the same log gives the same answer tomorrow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from unicrond.events.vocabulary.phrases import EPOCH
from unicrond.events.wire.envelope import Entry

SECOND_US = 1_000_000
_UNITS_US = {"ms": 1000, "s": SECOND_US, "m": 60 * SECOND_US, "h": 3600 * SECOND_US, "d": 86400 * SECOND_US}
_SPAN = re.compile(r"-?(?P<number>[0-9]{1,12}(?:\.[0-9]{1,6})?)(?P<unit>ms|s|m|h|d)", re.ASCII)
POINT_SYNTAX = (
    "a sequence number (1234), a time with its zone (2026-11-20T09:30:00Z), or a span before the log's end (10m)"
)


@dataclass(frozen=True, slots=True)
class AtSeq:
    """A point after entry `seq`; 0 covers nothing."""

    seq: int

    def covers(self, entry: Entry) -> bool:
        """Say whether the entry is in the prefix, given that all before it are."""
        return entry.seq <= self.seq


@dataclass(frozen=True, slots=True)
class AtTime:
    """A point after the last entry before the first that was recorded after `time_us` (microseconds since the
    epoch)."""

    time_us: int

    def covers(self, entry: Entry) -> bool:
        """Say whether the entry is in the prefix, given that all before it are."""
        return entry.recorded_at_us <= self.time_us


@dataclass(frozen=True, slots=True)
class BeforeEnd:
    """A point `span_us` before the newest entry; it takes the log's end to make a point of it (`resolve`)."""

    span_us: int

    def resolve(self, end_us: int) -> AtTime:
        """Resolve the point, in a log whose newest entry was recorded at `end_us`."""
        return AtTime(end_us - self.span_us)


Point: TypeAlias = AtSeq | AtTime


def parse_point(text: str) -> Point | BeforeEnd:
    """Parse the point that a person wrote (see POINT_SYNTAX). Raises ValueError in one line."""
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return AtSeq(int(text))
    span = _SPAN.fullmatch(text)
    if span:
        return BeforeEnd(round(float(span["number"]) * _UNITS_US[span["unit"]]))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a point of a log; give {POINT_SYNTAX}") from None
    if time.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; append Z or an offset like +02:00")
    return AtTime((time - EPOCH) // timedelta(microseconds=1))
