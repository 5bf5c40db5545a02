"""Most commands of `unicron-replay`: from parsed options to lines on stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import msgspec

from unicrond.core.replayer import LogStep
from unicrond.core.state.state import ClusterState
from unicrond.ctl.history import require_story_words
from unicrond.display.event_lines import entry_json
from unicrond.display.goodput_tables import goodput_tables, hints
from unicrond.display.tables import plain
from unicrond.events.cli.command_line import UsageError, login_of
from unicrond.events.log.point import AtTime, Point
from unicrond.events.vocabulary.phrases import guess
from unicrond.events.wire.selection import Selection
from unicrond.replay.reading.export import Export
from unicrond.replay.reading.opening import (
    PROGRAM,
    as_json,
    file_source,
    open_source,
    require_place,
    require_reached,
    resolve,
    say,
    state_at,
)
from unicrond.replay.reading.progress import show, with_bar
from unicrond.replay.reading.source import LogChunk, mask_entries, read
from unicrond.replay.views.report import digest_json, entry_line, state_json, state_page, when
from unicrond.views.accounts import DEFAULT_LAST_S, Accounts, NoSuchSubject, Subject
from unicrond.views.goodput import GoodputTotals, account_step
from unicrond.views.goodput_report import EMPTY_READING, reading, report
from unicrond.views.table import VIEWS
from unicrond.views.view import View


async def state_command(options: argparse.Namespace) -> None:
    """Print the state at a point."""
    state = await state_at(options, options.at)
    say(as_json(state_json(state)) if options.json else state_page(state))


async def digest_command(options: argparse.Namespace) -> None:
    """Print the digest at a point."""
    state = await state_at(options, options.at)
    fields = digest_json(state)
    say(as_json(fields) if options.json else f"{fields['digest']}  at entry {state.seq}")


async def view_command(options: argparse.Namespace) -> None:
    """Print the value of a view by its name."""
    make = VIEWS.get(options.name)
    if make is None:
        raise UsageError(f"NAME: no view {options.name}; {guess(options.name, list(VIEWS))}")
    view = make()
    async with open_source(options) as source:
        state = await show(source, view, "reading", until=await resolve(source, options.at))
    require_reached(options.at, state.seq)
    say(json.dumps(view.value(state), indent=None if options.json else 2))  # integers of any size


async def export_command(options: argparse.Namespace) -> None:
    """Write the log into a file."""
    path: Path = options.path
    _require_export(path, replace=options.force)
    last_seq = 0
    async with open_source(options) as source:
        until = await resolve(source, options.until)
        async with aclosing(with_bar(read(source, until=until), "exporting")) as chunks:
            with Export(path) as export:
                async for chunk in chunks:
                    export.write(mask_entries(chunk.entries) if options.masked else chunk.entries)
                    last_seq = chunk.entries[-1].seq if chunk.entries else last_seq
                require_reached(options.until, last_seq)
                beats = 0
                async with aclosing(source.beats()) as batches:
                    async for batch in batches:
                        export.write_beats(batch)
                        beats += len(batch)
    if options.json:
        say(as_json({"path": str(path), "last_seq": last_seq, "beats": beats}))
    else:
        content = f"entries 1 to {last_seq}" if last_seq else "an empty log"
        say(f"{path}: {content}" + (f", and the last {beats} heartbeats" if beats else ""))


async def events_command(options: argparse.Namespace) -> None:
    """Print the entries of a stretch of the log, one line each."""
    selection = Selection(types=frozenset(options.type), node=options.node or "", task=options.task or "")
    lines: deque[str] = deque(maxlen=options.limit)
    matched = 0
    async with open_source(options) as source:
        after, until = await resolve(source, options.since), await resolve(source, options.until)
        chunks: AsyncGenerator[LogChunk, None] = read(source, after=after, until=until)
        if not sys.stdout.isatty():  # a bar among the lines would be useless
            chunks = with_bar(chunks, "reading")
        async with aclosing(chunks):
            async for chunk in chunks:
                for entry in chunk.entries:
                    if selection.takes(entry):
                        matched += 1
                        line = as_json(entry_json(entry)) if options.json else entry_line(entry)
                        if options.limit is None:
                            say(line)
                        else:
                            lines.append(line)
    for line in lines:
        say(line)
    if not matched:
        print(f"{PROGRAM}: no events match", file=sys.stderr)


def _require_export(path: Path, *, replace: bool) -> None:
    """Check that the export can be written there. Raises UsageError."""
    require_place("FILE", path)
    if path.exists() and not replace:
        raise UsageError(f"FILE: {path} exists; name another one, or give --force to replace it")


async def story_command(options: argparse.Namespace) -> int:
    """Read the log, and print the account of one subject, or without one that of the cluster."""
    require_story_words(options)
    subject = Subject(options.kind or "cluster", options.name or "")
    accounts = Accounts(subject)
    async with open_source(options) as source:
        since = await resolve(source, options.since)
        until = await resolve(source, options.until)
        state = await show(source, accounts, "looking", until=until)
    require_reached(options.until, state.seq)
    try:
        if subject.kind == "cluster":
            shift_us = state.now_us - DEFAULT_LAST_S * 1_000_000
            story = accounts.cluster_story(since.time_us if isinstance(since, AtTime) else max(0, shift_us))
        else:
            story = accounts.story(*subject)
    except NoSuchSubject as error:
        raise UsageError(f"NAME: {error.args[0]}") from None
    say(as_json(msgspec.to_builtins(story)) if options.json else "\n".join(story.lines))
    return 0


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
        interval = _Interval(await resolve(source, options.since))
        state = await show(source, interval, "counting", until=await resolve(source, options.until))
    require_reached(options.until, state.seq)
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


async def import_command(options: argparse.Namespace) -> int:
    """Import into a directory of segments, or into a NATS server that has no log yet."""
    from unicrond.replay.reading.importing import import_to_directory, import_to_nats

    source = file_source(options.path)
    chunks = with_bar(source.chunks(), "importing")
    if options.into is not None:
        last, where, times = await import_to_directory(chunks, options.into, source.beats()), str(options.into), "kept"
    else:
        from unicrond.events.nats.connection import connect

        connection = await connect(options.nats, name="unicron-replay", login=login_of(options), timeout_s=5.0)
        try:
            last, where, times = await import_to_nats(chunks, connection), connection.urls, "those of the import"
        finally:
            await connection.close()
    if options.json:
        say(as_json({"into": where, "last_seq": last, "times_kept": times == "kept"}))
    else:
        note = (
            ""
            if times == "kept"
            else " (NATS dates what it stores), and the digests differ accordingly; compare by --log"
        )
        say(f"{where}: entries 1 to {last}; the recorded times are {times}{note}" if last else f"{where}: an empty log")
    return 0
