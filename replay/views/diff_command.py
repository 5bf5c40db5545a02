"""`unicron-replay diff`: two points of one log, or of two logs."""

from __future__ import annotations

import argparse
from contextlib import aclosing
from typing import Any

from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import digest
from unicrond.events.vocabulary.phrases import clean
from unicrond.replay.reading.opening import as_json, file_source, fold_to, open_source, say
from unicrond.replay.reading.source import Source, entries_of
from unicrond.replay.views.difference import differences, lines
from unicrond.replay.views.report import when


async def diff_command(options: argparse.Namespace) -> int:
    """Print what changed in the state from A to B. Exit code 0 either way."""
    async with open_source(options) as source:
        second: Source = file_source(options.other_log) if options.other_log else source
        before, after = await fold_to(source, options.a), await fold_to(second, options.b)
        first_difference = await _first_difference(source, second) if options.other_log else None
    changes = differences(before, after)
    if options.json:
        say(
            as_json(
                {
                    "before": _side(before),
                    "after": _side(after),
                    "first_other_entry": first_difference,
                    "differences": [change._asdict() for change in changes],
                }
            )
        )
        return 0
    say(f"A: {when(before)}, digest {digest(before)}")
    say(f"B: {when(after)}, digest {digest(after)}")
    if options.other_log:
        say(
            f"the logs differ from entry {first_difference} on"
            if first_difference
            else "the logs agree to the end of the shorter one"
        )
    for line in lines(changes) or ["the states are equal"]:
        say(clean(line))
    return 0


def _side(state: ClusterState) -> dict[str, Any]:
    return {"seq": state.seq, "now_us": state.now_us, "digest": digest(state)}


async def _first_difference(source: Source, second: Source) -> int | None:
    """Return the first number under which the two logs hold different entries; None if one begins like the other."""
    async with aclosing(entries_of(source)) as first_entries, aclosing(entries_of(second)) as second_entries:
        async for entry in first_entries:
            counterpart = await anext(second_entries, None)
            if counterpart is None:
                return None
            if repr(entry) != repr(counterpart):  # by repr: a loss may be NaN
                return entry.seq
    return None
