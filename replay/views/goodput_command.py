"""`unicron-replay goodput`: what of the cluster's work and time was good, and where the rest went."""

from __future__ import annotations

import argparse
import json
from contextlib import aclosing

from unicrond.core.fold import fold
from unicrond.core.state.state import ClusterState
from unicrond.display.goodput_tables import goodput_tables, hints
from unicrond.display.tables import plain
from unicrond.replay.reading.opening import open_source, require_reached, resolve, say
from unicrond.replay.reading.progress import with_bar
from unicrond.replay.reading.source import read
from unicrond.replay.views.report import when
from unicrond.views.goodput import GoodputTotals, account_step
from unicrond.views.goodput_report import EMPTY_READING, reading, report
from unicrond.views.view import LogStep


async def goodput_command(options: argparse.Namespace) -> int:
    """Print the goodput after one pass over the log; the interval is the difference of two readings."""
    state, totals, since = ClusterState(), GoodputTotals(), EMPTY_READING
    async with open_source(options) as source:
        after, until = await resolve(source, options.after), await resolve(source, options.at)
        async with aclosing(with_bar(read(source, until=until), "counting")) as chunks:
            async for chunk in chunks:
                for entry in chunk.entries:
                    if after is not None and not after.covers(entry):
                        since, after = reading(totals, state), None
                    before, state = state, fold(state, entry)
                    totals = account_step(totals, LogStep(before, entry, state))
    require_reached(options.at, state.seq)
    if after is not None:  # it covers all that there is
        since = reading(totals, state)
    figures = report(reading(totals, state), state, since, options.peak_tflops * 1e12)
    if options.json:
        say(json.dumps(figures))
        return 0
    say(f"goodput up to {when(state)}" + (f", after entry {since.seq}" if since.seq else ""))
    for title, table in goodput_tables(figures):
        say("\n".join(["", title, *(f"  {line}" for line in plain(table))]))
    for hint in hints(figures):
        say(f"\n{hint}")
    return 0
