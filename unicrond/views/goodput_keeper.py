"""The coordinator's books: goodput (core/goodput.py), kept with its snapshots, and how long the phases of transitions
took since this process began to read; and the traces of incidents (core/spans.py), passed to a subscriber.

Nothing is decided from them. Should they ever fail, that is logged once, and everything else goes on.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from unicrond.core.state.state import ClusterState
from unicrond.events.wire.envelope import Entry, Recorded
from unicrond.views.goodput import GoodputTotals, account_event
from unicrond.views.goodput_report import EMPTY_READING, GoodputReading, reading
from unicrond.views.spans import PHASES, Span, Spans

log = logging.getLogger("unicrond")


class Lasted(NamedTuple):
    """How often a phase happened, and how long all of them took together."""

    times: int = 0
    total_us: int = 0


def _ignore_spans(_: Sequence[Span]) -> None:
    pass


#: How often sums are remembered, so that the goodput of an interval can be computed; and how many: a month of them.
READING_US, READINGS_MAX = 600_000_000, 30 * 24 * 6


class Bookkeeper:
    """Keeps the books. `books`: goodput up to the coordinator's state; None once they have failed. `phases`: of
    transitions. `ended`: called with the spans that have ended; must neither raise nor wait."""

    def __init__(self) -> None:
        self.ended: Callable[[Sequence[Span]], None] = _ignore_spans
        self.begin()

    def begin(self) -> None:
        """Start again at the log's beginning, where nothing is known."""
        self.books: GoodputTotals | None = GoodputTotals()
        self.phases = dict.fromkeys(PHASES, Lasted())
        self._spans: Spans | None = Spans()
        self._readings: deque[GoodputReading] = deque(maxlen=READINGS_MAX)

    def folded(self, before: ClusterState, after: ClusterState, entry: Entry) -> None:
        """Record an entry, which has led from one state to the other."""
        if not isinstance(entry, Recorded):
            return
        if self.books is not None:
            try:
                self.books = account_event(self.books, before, after, entry.envelope.event)
            except Exception:  # a bug of ours must not stop what heals
                message = "goodput: the books end at entry %d; restart the coordinator without its snapshot"
                log.exception(message, entry.seq)
                self.books = None
            else:
                self._remember(after)
        if self._spans is not None:
            try:
                self._note(self._spans.feed(before, after, entry))
            except Exception:
                log.exception("traces: they end at entry %d; restart the coordinator", entry.seq)
                self._spans = None

    def since(self, time_us: int) -> GoodputReading:
        """Return the last sums that were remembered before this time, else the oldest ones. Sums from before the
        snapshot that this process began with are not kept."""
        at = bisect_right(self._readings, time_us, key=lambda sums: sums.at_us)
        return self._readings[max(0, at - 1)] if self._readings else EMPTY_READING

    def _remember(self, state: ClusterState) -> None:
        last_us = self._readings[-1].at_us if self._readings else 0
        if self.books is not None and state.now_us - last_us >= READING_US:
            self._readings.append(reading(self.books, state))

    def _note(self, spans: Sequence[Span]) -> None:
        for span in spans:
            if span.name in self.phases:
                times, total_us = self.phases[span.name]
                self.phases[span.name] = Lasted(times + 1, total_us + span.end_us - span.start_us)
        if spans:
            self.ended(spans)


def encoded(books: GoodputTotals | None) -> bytes:
    """Return the books as bytes, for a snapshot."""
    return msgspec.msgpack.encode(books)


def decoded(body: bytes) -> GoodputTotals | None:
    """Return the books that a snapshot holds. Raises msgspec.MsgspecError."""
    books: GoodputTotals | None = msgspec.msgpack.decode(body, type=GoodputTotals | None)
    return books
