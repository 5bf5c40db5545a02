"""`unicron-replay diff`: two points of one log, or of two logs."""

from __future__ import annotations

import argparse
from contextlib import aclosing
from typing import Any

from replay.reading.opening import as_json, file_source, fold_to, open_source, say
from replay.reading.source import Source, entries_of
from replay.views.difference import differences, lines
from replay.views.report import when
from unicrond.core.state import ClusterState
from unicrond.core.state_bytes import digest
from unicrond.display.tables import clean


async def diff_command(options: argparse.Namespace) -> int:
    """What changed in the state from A to B. Exit code 0 either way."""
    async with open_source(options) as source:
        other: Source = file_source(options.other) if options.other else source
        before, after = await fold_to(source, options.a), await fold_to(other, options.b)
        parted = await _first_other_entry(source, other) if options.other else None
    found = differences(before, after)
    if options.json:
        say(
            as_json(
                {
                    "before": _side(before),
                    "after": _side(after),
                    "first_other_entry": parted,
                    "differences": [each._asdict() for each in found],
                }
            )
        )
        return 0
    say(f"A: {when(before)}, digest {digest(before)}")
    say(f"B: {when(after)}, digest {digest(after)}")
    if options.other:
        say(f"the logs differ from entry {parted} on" if parted else "the logs agree to the end of the shorter one")
    for line in lines(found) or ["the states are equal"]:
        say(clean(line))
    return 0


def _side(state: ClusterState) -> dict[str, Any]:
    return {"seq": state.seq, "now_us": state.now_us, "digest": digest(state)}


async def _first_other_entry(source: Source, other: Source) -> int | None:
    """The first number under which the two logs hold different entries; None if one begins like the other."""
    async with aclosing(entries_of(source)) as ours, aclosing(entries_of(other)) as theirs:
        async for entry in ours:
            same = await anext(theirs, None)
            if same is None:
                return None
            if repr(entry) != repr(same):  # by repr: a loss may be NaN
                return entry.seq
    return None
