"""From parsed options to the log that they name, a point in it, the state there; and how a command speaks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from events.command_line import UsageError, login_of
from replay.reading.point import AtSeq, AtTime, BeforeEnd, Point
from replay.reading.progress import with_bar
from replay.reading.replayer import EMPTY, replay
from replay.reading.source import FileSource, Source, read
from unicrond.core.state import ClusterState

PROGRAM = "unicron-replay"


@asynccontextmanager
async def open_source(options: argparse.Namespace) -> AsyncIterator[Source]:
    """The log that the options name."""
    if options.file is not None:
        if options.archive is not None:
            raise UsageError("--archive: is the older part of a log on NATS; with --file leave it out")
        yield file_source(options.file)
        return
    from replay.reading.nats_source import embedded_login, embedded_url, open_nats  # the NATS client takes 100 ms

    archive, login = _archive(options), login_of(options)
    if options.nats is None:
        urls, login = [await embedded_url(options.state_dir)], embedded_login(options.state_dir, login)
    else:
        urls = options.nats
    async with open_nats(urls, login, archive=archive) as source:
        yield source


def file_source(path: Path) -> FileSource:
    """The exported log at `path`."""
    try:
        return FileSource(path)
    except OSError as error:
        raise UsageError(f"--file: {path} cannot be read: {error.strerror}; name an exported log") from None


async def state_at(options: argparse.Namespace, at: Point | BeforeEnd | None) -> ClusterState:
    """The state at a point of the log that the options name. UsageError beyond its end."""
    async with open_source(options) as source:
        start = await _snapshot(source) if options.from_snapshot else EMPTY
        return await fold_to(source, at, start)


async def _snapshot(source: Source) -> ClusterState:
    """The coordinator's newest snapshot."""
    from replay.reading.nats_source import NatsSource

    if not isinstance(source, NatsSource):
        raise UsageError("--from-snapshot: a file has none; give --nats or --state-dir")
    state = await source.snapshot()
    if state is None:
        raise UsageError("--from-snapshot: no snapshot fits; leave it out")
    return state


def _archive(options: argparse.Namespace) -> Path | None:
    """The one that is named, or the state directory's own."""
    named: Path | None = options.archive
    if named is not None and not named.is_dir():
        raise UsageError(f"--archive: {named} is not a directory; give the one that `unicrond archive` wrote")
    if named is None and options.state_dir is not None and (options.state_dir / "archive").is_dir():
        return Path(options.state_dir / "archive")
    return named


def require_place(what: str, path: Path) -> None:
    """A file can be written at `path`, in place of an older one at most. UsageError, which begins with `what`."""
    if not path.parent.is_dir():
        raise UsageError(f"{what}: {path.parent} is not a directory; create it or name another place")
    if path.exists() and not path.is_file():
        raise UsageError(f"{what}: {path} is not a regular file and cannot be replaced; name another one")


async def fold_to(source: Source, at: Point | BeforeEnd | None, start: ClusterState = EMPTY) -> ClusterState:
    """The state of `source` at a point, folded from `start`. UsageError beyond its end, or before `start`."""
    state = start
    until = await resolve(source, at)
    if (isinstance(until, AtSeq) and until.seq < start.seq) or (
        isinstance(until, AtTime) and until.time_us < start.now_us and start.seq
    ):
        raise UsageError(f"--from-snapshot: the snapshot is of entry {start.seq}, after --at; leave it out")
    async with aclosing(with_bar(read(source, after=AtSeq(start.seq), until=until), "replaying")) as chunks:
        async for chunk in chunks:
            state = replay(chunk.entries, start=state)
    require_reached(at, state.seq)
    return state


def require_reached(at: Point | BeforeEnd | None, last_seq: int) -> None:
    """A state "at 900" of a log of 800 would be a guess about the future."""
    if isinstance(at, AtSeq) and last_seq < at.seq:
        raise UsageError(f"--at: entry {at.seq} is not in the log, which ends at entry {last_seq}")


async def resolve(source: Source, point: Point | BeforeEnd | None) -> Point | None:
    """The point, where it was given as a span before the end."""
    return point.resolve(await source.end_us()) if isinstance(point, BeforeEnd) else point


def as_json(value: Any) -> str:
    """One line of JSON; a NaN loss becomes null."""
    return msgspec.json.encode(value).decode()


def say(text: str) -> None:
    """A line on stdout."""
    sys.stdout.write(text + "\n")
