"""`unicron-replay goodput`: what of the cluster's work and time was good, and where the rest went."""

from __future__ import annotations

import argparse
import json

from unicrond.core.replayer import LogStep
from unicrond.core.state.state import ClusterState
from unicrond.display.goodput_tables import goodput_tables, hints
from unicrond.display.tables import plain
from unicrond.events.log.point import Point
from unicrond.replay.reading.opening import open_source, require_reached, resolve, say
from unicrond.replay.reading.progress import show
from unicrond.replay.views.report import when
from unicrond.views.goodput import GoodputTotals, account_step
from unicrond.views.goodput_report import EMPTY_READING, reading, report
from unicrond.views.view import View


class _Interval(View):
    """Sums up the goodput. `since`: the sums after the entries that `after` covers."""

    def __init__(self, after: Point | None) -> None:
        self.totals, self.since = GoodputTotals(), EMPTY_READING
        self._after = after

    def feed(self, step: LogStep) -> None:
        """Add the next step."""
        if self._after is not None and not self._after.covers(step.entry):
            self.since, self._after = reading(self.totals, step.before), None
        self.totals = account_step(self.totals, step)

    def finish(self, state: ClusterState) -> None:
        """Begin the interval after the last step, if `after` covers all."""
        if self._after is not None:
            self.since = reading(self.totals, state)


async def goodput_command(options: argparse.Namespace) -> int:
    """Print the goodput after one pass over the log; the interval is the difference of two readings."""
    async with open_source(options) as source:
        interval = _Interval(await resolve(source, options.after))
        state = await show(source, interval, "counting", until=await resolve(source, options.at))
    require_reached(options.at, state.seq)
    interval.finish(state)
    since = interval.since
    figures = report(reading(interval.totals, state), state, since, options.peak_tflops * 1e12)
    if options.json:
        say(json.dumps(figures))
        return 0
    say(f"goodput up to {when(state)}" + (f", after entry {since.seq}" if since.seq else ""))
    for title, table in goodput_tables(figures):
        say("\n".join(["", title, *(f"  {line}" for line in plain(table))]))
    for hint in hints(figures):
        say(f"\n{hint}")
    return 0
