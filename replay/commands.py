"""The four commands of `unicron-replay`, from parsed options to lines on stdout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from replay.export import Export
from replay.point import AtSeq, BeforeEnd, Point
from replay.progress import with_bar
from replay.replayer import EMPTY, replay
from replay.report import digest_json, entry_json, entry_line, state_json, state_page
from replay.selection import Selection
from replay.source import Chunk, FileSource, Source, read
from unicrond.state import ClusterState

PROGRAM = "unicron-replay"


class UsageError(Exception):
    """An option that cannot be used; names it and the fix."""


async def state_command(options: argparse.Namespace) -> None:
    """The state at a point."""
    state = await _replay(options)
    _print(_json(state_json(state)) if options.json else state_page(state))


async def digest_command(options: argparse.Namespace) -> None:
    """The digest at a point."""
    state = await _replay(options)
    said = digest_json(state)
    _print(_json(said) if options.json else f"{said['digest']}  at entry {state.seq}")


async def export_command(options: argparse.Namespace) -> None:
    """The log as a file."""
    path: Path = options.path
    _require_place(path, replace=options.force)
    last_seq = 0
    async with _open(options) as source:
        until = await _point(source, options.at)
        async with aclosing(with_bar(read(source, until=until), "exporting")) as chunks:
            with Export(path) as export:
                async for chunk in chunks:
                    export.write(chunk.entries)
                    last_seq = chunk.entries[-1].seq if chunk.entries else last_seq
                _require_reached(options.at, last_seq)
                beats = 0
                async with aclosing(source.beats()) as retained:
                    async for some in retained:
                        export.write_beats(some)
                        beats += len(some)
    if options.json:
        _print(_json({"path": str(path), "last_seq": last_seq, "beats": beats}))
    else:
        held = f"entries 1 to {last_seq}" if last_seq else "an empty log"
        _print(f"{path}: {held}" + (f", and the last {beats} heartbeats" if beats else ""))


async def events_command(options: argparse.Namespace) -> None:
    """The entries of a stretch of the log, one line each."""
    selection = Selection(types=frozenset(options.type), node=options.node or "", task=options.task or "")
    matched = 0
    async with _open(options) as source:
        after, until = await _point(source, options.after), await _point(source, options.until)
        chunks: AsyncGenerator[Chunk, None] = read(source, after=after, until=until)
        if not sys.stdout.isatty():  # a bar among the lines would help nobody
            chunks = with_bar(chunks, "reading")
        async with aclosing(chunks):
            async for chunk in chunks:
                for entry in chunk.entries:
                    if selection.takes(entry):
                        matched += 1
                        _print(_json(entry_json(entry)) if options.json else entry_line(entry))
    if not matched:
        print(f"{PROGRAM}: no event matches", file=sys.stderr)


async def _replay(options: argparse.Namespace) -> ClusterState:
    state = EMPTY
    async with _open(options) as source:
        until = await _point(source, options.at)
        async with aclosing(with_bar(read(source, until=until), "replaying")) as chunks:
            async for chunk in chunks:
                state = replay(chunk.entries, start=state)
    _require_reached(options.at, state.seq)
    return state


def _require_reached(at: Point | BeforeEnd | None, last_seq: int) -> None:
    """A state "at 900" of a log of 800 would be a guess about the future."""
    if isinstance(at, AtSeq) and last_seq < at.seq:
        raise UsageError(f"--at: entry {at.seq} is not in the log, which ends at entry {last_seq}")


async def _point(source: Source, point: Point | BeforeEnd | None) -> Point | None:
    return point.resolve(await source.end_us()) if isinstance(point, BeforeEnd) else point


@asynccontextmanager
async def _open(options: argparse.Namespace) -> AsyncIterator[Source]:
    """The log that the options name."""
    if options.file is not None:
        yield _file_source(options.file)
        return
    from events.nats_connection import Login  # the NATS client takes 100 ms to import, and a file needs none of it
    from replay.nats_source import embedded_url, open_nats

    password = options.password_file.read_text().strip() if options.password_file else None
    login = Login(
        user=options.user, password=password, creds=options.creds, nkey_seed=options.nkey_seed, tls_ca=options.tls_ca
    )
    urls = options.nats if options.nats is not None else [await embedded_url(options.state_dir)]
    async with open_nats(urls, login) as source:
        yield source


def _file_source(path: Path) -> FileSource:
    try:
        return FileSource(path)
    except OSError as error:
        raise UsageError(f"--file: {path} cannot be read: {error.strerror}; name an exported log") from None


def _require_place(path: Path, *, replace: bool) -> None:
    """The export can be written there."""
    if not path.parent.is_dir():
        raise UsageError(f"FILE: {path.parent} is no directory; create it or name another place")
    if path.is_dir():
        raise UsageError(f"FILE: {path} is a directory; name a file in it")
    if path.exists() and not replace:
        raise UsageError(f"FILE: {path} exists; name another one, or give --force to replace it")


def _json(value: Any) -> str:
    """One line of JSON; a NaN loss becomes null."""
    return msgspec.json.encode(value).decode()


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
