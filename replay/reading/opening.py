"""From parsed options to the log that they name, a point in it, the state there; and how a command speaks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from events.command_line import UsageError, login_of
from events.point import AtSeq, AtTime, BeforeEnd, Point
from replay.reading.api_source import open_api
from replay.reading.bundle import unpacked
from replay.reading.progress import with_bar
from replay.reading.shown import SHOWN
from replay.reading.source import FileSource, Source, read
from unicrond.core.replayer import EMPTY, replay
from unicrond.core.state import ClusterState
from unicrond.ctl.asking import client_of

if TYPE_CHECKING:
    from events.nats_connection import Login

PROGRAM = "unicron-replay"


@asynccontextmanager
async def open_source(options: argparse.Namespace) -> AsyncIterator[Source]:
    """The log that the options name."""
    if options.archive is not None and (options.file is not None or options.url is not None):
        other = "--file" if options.file is not None else "--url"
        raise UsageError(f"--archive: is the older part of a log on NATS; with {other} leave it out")
    if options.url is not None:
        yield await open_api(client_of(options))
        return
    if options.file is not None:
        with unpacked(options.file) as path:
            yield file_source(path)
        return
    archive, login = _archive(options), login_of(options)
    if options.nats is None:
        async with _directory_source(options.state_dir, login, archive) as source:
            yield source
        return
    from replay.reading.nats_source import open_nats  # the NATS client takes 100 ms

    async with open_nats(options.nats, login, archive=archive) as source:
        yield source


@asynccontextmanager
async def _directory_source(state_dir: Path, login: Login, archive: Path | None) -> AsyncIterator[Source]:
    """The log of a coordinator's directory, whether its server runs or not; of a backup."""
    from replay.reading.nats_source import embedded_login, open_nats
    from replay.reading.stopped_cluster import running_url, served_copy, store_of

    async with AsyncExitStack() as stack:
        running = await running_url(state_dir)
        if running is None and archive is not None and not store_of(state_dir).is_dir():
            yield file_source(archive)
            return
        served = (running, None) if running else await stack.enter_async_context(served_copy(state_dir))
        login = served[1] or embedded_login(state_dir, login)
        yield await stack.enter_async_context(open_nats([served[0]], login, archive=archive))


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
    if state is not None:
        SHOWN.learn(task.spec for task in state.tasks.values())
    else:
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
    """One line of JSON, without secrets; a NaN loss becomes null."""
    return msgspec.json.encode(SHOWN.plain(value)).decode()


def say(text: str) -> None:
    """A line on stdout; no secret is in it."""
    sys.stdout.write(SHOWN.text(text) + "\n")
