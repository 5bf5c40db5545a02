"""The goodput of a head (goodput.py), as it goes on from entry to entry; snapshots hold its totals."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Any

import msgspec

from unicrond.core.replayer import LogStep
from unicrond.core.state.state import ClusterState
from unicrond.views.goodput import GoodputTotals, account_step
from unicrond.views.goodput_report import EMPTY_READING, GoodputReading, reading, report
from unicrond.views.view import JsonView

#: How often sums are remembered, so that the goodput of an interval can be computed; and how many: a month of them.
READING_US, READINGS_MAX = 600_000_000, 30 * 24 * 6


class GoodputKeeper(JsonView):
    """Keeps the totals up to the last step. `totals`: None once they have failed."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start again at the log's beginning, where nothing is known."""
        self.totals: GoodputTotals | None = GoodputTotals()
        self._readings: deque[GoodputReading] = deque(maxlen=READINGS_MAX)

    def feed(self, step: LogStep) -> None:
        """Add a step to the totals."""
        totals, self.totals = self.totals, None  # and none they are if this raises
        if totals is not None:
            totals = account_step(totals, step)
            self._remember(totals, step.after)
            self.totals = totals

    def value(self, state: ClusterState) -> dict[str, Any] | None:
        """Return the report of goodput_report.py; None once the totals have failed."""
        return None if self.totals is None else report(reading(self.totals, state), state)

    def resume(self, totals: GoodputTotals | None) -> None:
        """Go on from the totals that a snapshot holds."""
        self.totals = totals

    def since(self, time_us: int) -> GoodputReading:
        """Return the last sums that were remembered before this time, else the oldest ones. Sums from before the
        snapshot that this process began with are not kept."""
        at = bisect_right(self._readings, time_us, key=lambda sums: sums.at_us)
        return self._readings[max(0, at - 1)] if self._readings else EMPTY_READING

    def _remember(self, totals: GoodputTotals, state: ClusterState) -> None:
        last_us = self._readings[-1].at_us if self._readings else 0
        if state.now_us - last_us >= READING_US:
            self._readings.append(reading(totals, state))


def encoded(totals: GoodputTotals | None) -> bytes:
    """Return the totals as bytes, for a snapshot."""
    return msgspec.msgpack.encode(totals)


def decoded(body: bytes) -> GoodputTotals | None:
    """Return the totals that a snapshot holds. Raises msgspec.MsgspecError."""
    totals: GoodputTotals | None = msgspec.msgpack.decode(body, type=GoodputTotals | None)
    return totals
