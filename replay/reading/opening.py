"""Turn parsed options into the log that they name, a point in it and the state there; and print what a command
reports."""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from unicrond.core.replayer import EMPTY, replay
from unicrond.core.state.state import ClusterState
from unicrond.ctl.client_options import client_of
from unicrond.events.cli.command_line import UsageError, login_of
from unicrond.events.log.event_log import LogDamaged
from unicrond.events.log.point import AtSeq, AtTime, BeforeEnd, Point
from unicrond.replay.reading.api_source import open_api
from unicrond.replay.reading.progress import with_bar
from unicrond.replay.reading.source import REDACTOR, FileSource, Source, read

if TYPE_CHECKING:
    from unicrond.events.nats.connection import Login

#: The member of what `unicronctl debug` writes that is the log, as `unicron-replay export` writes it.
BUNDLED_LOG = "events.log"
PROGRAM = "unicron-replay"


@asynccontextmanager
async def open_source(options: argparse.Namespace) -> AsyncIterator[Source]:
    """Open the log that the options name. Raises UsageError, LogError."""
    if options.archive is not None and (options.log is not None or options.url is not None):
        flag = "--log" if options.log is not None else "--url"
        raise UsageError(f"--archive: is the older part of a log on NATS; with {flag} leave it out")
    if options.url is not None:
        yield await open_api(client_of(options))
        return
    if options.log is not None:
        with unpack_log(options.log) as path:
            yield file_source(path)
        return
    archive, login = _archive(options), login_of(options)
    if options.nats is None:
        async with _directory_source(options.state_dir, login, archive) as source:
            yield source
        return
    from unicrond.replay.reading.nats_source import open_nats  # the NATS client takes 100 ms

    async with open_nats(options.nats, login, archive=archive) as source:
        yield source


@asynccontextmanager
async def _directory_source(state_dir: Path, login: Login, archive: Path | None) -> AsyncIterator[Source]:
    """Open the log of a coordinator's directory, whether its server runs or not; or of a backup."""
    from unicrond.replay.reading.nats_source import embedded_login, open_nats
    from unicrond.replay.reading.stopped_cluster import running_url, serve_copy, store_of

    async with AsyncExitStack() as stack:
        url = await running_url(state_dir)
        if url is None and archive is not None and not store_of(state_dir).is_dir():
            yield file_source(archive)
            return
        endpoint = (url, None) if url else await stack.enter_async_context(serve_copy(state_dir))
        login = endpoint[1] or embedded_login(state_dir, login)
        yield await stack.enter_async_context(open_nats([endpoint[0]], login, archive=archive))


def file_source(path: Path) -> FileSource:
    """Open the exported log at `path`. Raises UsageError where it cannot be read."""
    try:
        return FileSource(path)
    except OSError as error:
        raise UsageError(f"--log: {path} cannot be read: {error.strerror}; name an exported log") from None


async def state_at(options: argparse.Namespace, at: Point | BeforeEnd | None) -> ClusterState:
    """Return the state at a point of the log that the options name. Raises UsageError beyond its end."""
    async with open_source(options) as source:
        start = await _snapshot(source) if options.from_snapshot else EMPTY
        return await fold_to(source, at, start)


async def _snapshot(source: Source) -> ClusterState:
    """Return the coordinator's newest snapshot. Raises UsageError where there is none."""
    from unicrond.replay.reading.nats_source import NatsSource

    if not isinstance(source, NatsSource):
        raise UsageError("--from-snapshot: a file has none; give --nats or --state-dir")
    state = await source.snapshot()
    if state is not None:
        REDACTOR.learn(task.spec for task in state.tasks.values())
    else:
        raise UsageError("--from-snapshot: no snapshot fits; leave it out")
    return state


def _archive(options: argparse.Namespace) -> Path | None:
    """Return the archive that the options name, or the state directory's own; None without either."""
    path: Path | None = options.archive
    if path is not None and not path.is_dir():
        raise UsageError(f"--archive: {path} is not a directory; give the one that `unicrond archive` wrote")
    if path is None and options.state_dir is not None and (options.state_dir / "archive").is_dir():
        return Path(options.state_dir / "archive")
    return path


def require_place(option: str, path: Path) -> None:
    """Check that a file can be written at `path`, in place of an older one at most. Raises UsageError, which begins
    with `option`."""
    if not path.parent.is_dir():
        raise UsageError(f"{option}: {path.parent} is not a directory; create it or name another place")
    if path.exists() and not path.is_file():
        raise UsageError(f"{option}: {path} is not a regular file and cannot be replaced; name another one")


async def fold_to(source: Source, at: Point | BeforeEnd | None, start: ClusterState = EMPTY) -> ClusterState:
    """Fold `source` from `start` to a point, and return the state. Raises UsageError beyond its end, or before
    `start`."""
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
    """Raise UsageError where the point is beyond the log: a state "at 900" of a log of 800 would be a guess."""
    if isinstance(at, AtSeq) and last_seq < at.seq:
        raise UsageError(f"--at: entry {at.seq} is not in the log, which ends at entry {last_seq}")


async def resolve(source: Source, point: Point | BeforeEnd | None) -> Point | None:
    """Resolve a point that is a span before the end; return any other point as it is."""
    return point.resolve(await source.end_us()) if isinstance(point, BeforeEnd) else point


def as_json(value: Any) -> str:
    """Encode as one line of JSON, without secrets; a NaN loss becomes null."""
    return msgspec.json.encode(REDACTOR.plain(value)).decode()


def say(text: str) -> None:
    """Write a line to stdout, with secrets masked."""
    sys.stdout.write(REDACTOR.text(text) + "\n")


@contextmanager
def unpack_log(path: Path) -> Iterator[Path]:
    """Unpack the log of a bundle into a file that exists as long as the context; yield any other path as it is.

    Raises LogDamaged where the archive holds no log."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="unicron-replay-") as place:
        try:
            with zipfile.ZipFile(path) as bundle:
                bundle.extract(BUNDLED_LOG, place)
        except (KeyError, zipfile.BadZipFile) as error:
            raise LogDamaged(f"{path}: holds no {BUNDLED_LOG} ({error}); name a file of `unicronctl debug`") from None
        yield Path(place) / BUNDLED_LOG
