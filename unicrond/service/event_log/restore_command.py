"""`unicrond restore` without a backup: the event stream that NATS has lost, made again from the archive.

Rules
-----
* It runs beside the head, or without one. An embedded server gets the stream's files, and is started anew for them, by
  the head if one runs.
* An archive from elsewhere becomes the head's once NATS has proved to hold no log: a refusal leaves nothing behind.
* Nobody else writes to the archive meanwhile, and what a head that runs had read stands in it before.
* It makes the stream where there is none, or an empty one, and says what the archive lacks of what this head has
  folded.
* Nothing is ordered by it: a log that is whole is the same log. One that lacks entries takes a person's word
  (known_event_log.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from unicrond.events.archive import restoration
from unicrond.events.log.event_log import LogError
from unicrond.events.log.segment_writer import LogBusy, SegmentWriter
from unicrond.events.log.segments import segment_paths
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.server import EmbeddedServer, ServerError
from unicrond.events.nats.streams import api
from unicrond.events.trust.logins import Role
from unicrond.intake.config import Config, login_as
from unicrond.service.coordinator.other_processes import InUse, sole_user
from unicrond.service.event_log.archive_command import CONNECT_TIMEOUT_S
from unicrond.service.event_log.known_event_log import KnownLog, difference

_UP_S = 60.0


class RestoredLog(NamedTuple):
    """The result: NATS holds entries `first_seq` to `last_seq` again, the archive those before. `gap`: entries that
    this head has folded, after the last. `remark`: what a head would say of it; "": it goes on by itself."""

    archive: str
    first_seq: int
    last_seq: int
    gap: int
    remark: str = ""
    is_dry: bool = False

    def __str__(self) -> str:
        verb = "would be restored" if self.is_dry else "are in NATS again, as they were recorded"
        text = f"{self.archive}: entries {self.first_seq} to {self.last_seq} {verb}"
        if self.gap:
            text += f"; {self.gap} that this head has folded are missing after them"
        if self.remark:
            text += f"\n{self.remark}: start the head with --new-log, once"
        return text


async def run(
    config: Config,
    source: Path | None = None,
    *,
    is_dry: bool = False,
    progress: restoration.Progress = lambda *_: None,
) -> RestoredLog:
    """Restore the log from `source`, None: the archive of the configuration; `is_dry`: only say what would be done.
    Raises LogError, OSError."""
    directory = _archive(config, source)
    work = _on_our_server if not config.nats.url else _on_servers
    await work(config, directory, None, progress)
    async with contextlib.AsyncExitStack() as stack:
        if not is_dry and directory == config.archive:
            await stack.enter_async_context(_sole_writer(directory))
        contents = restoration.survey(directory, config.keep_s)
        identity = KnownLog(Path(config.state_dir)).read()
        folded_seq = identity.mark.seq if identity is not None and identity.mark is not None else 0
        gap = max(0, folded_seq - contents.last_seq)
        result = RestoredLog(str(directory), contents.first_seq, contents.last_seq, gap, is_dry=is_dry)
        return result if is_dry else result._replace(remark=await work(config, directory, contents, progress))


@contextlib.asynccontextmanager
async def _sole_writer(directory: Path) -> AsyncIterator[None]:
    """Keep others from writing to the archive. A head that runs lets it go once it sees that its log is gone, and has
    written what it had read. Raises LogBusy."""
    end_s = time.monotonic() + _UP_S
    while True:
        try:
            writer = SegmentWriter(directory)
        except LogBusy:
            if time.monotonic() > end_s:
                raise
            await asyncio.sleep(0.1)
        else:
            break
    try:
        yield
    finally:
        writer.close()


async def _on_servers(
    config: Config,
    directory: Path,
    contents: restoration.ArchiveSurvey | None,
    progress: restoration.Progress,
) -> str:
    """Restore the log on servers of one's own; return what this head would say of it. Without `contents`: only look
    whether that may be done."""
    logins = _logins(config)
    async with _connected(config.nats.url, logins[0]) as target, _connected(config.nats.url, logins[1]) as operator:
        await restoration.require_none(target)
        if contents is None:
            return ""
        directory = _adopt(config, directory)
        with tempfile.TemporaryDirectory(prefix="restore-", dir=config.state_dir) as scratch:  # a disk, with room
            await restoration.restore_stream(
                target,
                operator,
                directory,
                contents,
                Path(scratch),
                replicas=config.nats.replicas,
                sha256=config.nats.server_sha256,
                progress=progress,
            )
        return await _remark(config, target)


async def _on_our_server(
    config: Config,
    directory: Path,
    contents: restoration.ArchiveSurvey | None,
    progress: restoration.Progress,
) -> str:
    """Restore the log on the embedded server, which starts anew; return what this head would say of it. Without
    `contents`: only look whether that may be done."""
    state_dir = Path(config.state_dir)
    home = state_dir / "nats"
    login = Login(user="unicrond-restore", password=secrets.token_urlsafe(24))  # while no head runs
    server = EmbeddedServer(home, login=login, dies_with_us=True, sha256=config.nats.server_sha256)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(sole_user(state_dir))
            has_head = False
            await server.stop()  # one that a head has left
        except InUse:
            server, login, has_head = EmbeddedServer.beside(home), _logins(config)[0], True
        try:
            await _up(server, has_head)
            async with _connected(server.url, login) as target:
                is_empty = await restoration.require_none(target)
            if contents is None:
                return ""
            directory = _adopt(config, directory)
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(prefix="restore-", dir=home) as scratch:
                files = await restoration.make_files(
                    directory, contents, Path(scratch), sha256=config.nats.server_sha256, progress=progress
                )
                await asyncio.to_thread(_make_durable, files)
                if is_empty:
                    async with _connected(server.url, _logins(config)[1] if has_head else login) as operator:
                        await api(operator, f"STREAM.DELETE.{EVENT_STREAM}", {})
                place = home / restoration.STREAM_DIRECTORY
                place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                files.rename(place)
            await server.stop()
            await _up(server, has_head)
            async with _connected(server.url, login) as target:
                await restoration.require_restored(target, contents)
                return await _remark(config, target)
        except ServerError as error:
            raise LogError(f"nats-server: {error}") from None
        finally:
            if not has_head:
                await server.stop()


async def _up(server: EmbeddedServer, has_head: bool) -> None:
    """Return once the server runs: a head that runs starts its own again. Raises LogError, ServerError."""
    if not has_head:
        await server.start()
        return
    try:
        async with asyncio.timeout(_UP_S):
            while not await server.adopt():  # noqa: ASYNC110  (another process starts it)
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise LogError(f"{server.directory}: the head has not started its nats-server within {_UP_S:g} s") from None


@contextlib.asynccontextmanager
async def _connected(url: str, login: Login) -> AsyncIterator[Connection]:
    """Connect as long as the context lasts."""
    connection = await connect(url, name="unicrond-restore", login=login, timeout_s=CONNECT_TIMEOUT_S)
    try:
        yield connection
    finally:
        await connection.close()


async def _remark(config: Config, target: Connection) -> str:
    return await difference(target, KnownLog(Path(config.state_dir)).proof())


def _make_durable(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _archive(config: Config, source: Path | None) -> Path:
    """Return the archive to read. Raises LogError."""
    if source is None or source.resolve() == config.archive.resolve():
        if not config.archive.is_dir():
            raise LogError(f"{config.archive}: is no archive; name one, or a backup")
        return config.archive
    if not source.is_dir() or not segment_paths(source):
        raise LogError(f"{source}: is neither a backup nor an archive")
    if config.archive.is_dir() and segment_paths(config.archive):
        raise LogError(f"{config.archive}: holds an archive already; move it away, or leave {source} out")
    return source


def _adopt(config: Config, directory: Path) -> Path:
    """Make an archive from elsewhere the head's, which reads the log's older part from it; return the head's."""
    if directory != config.archive:
        config.archive.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in segment_paths(directory):
            shutil.copyfile(path, config.archive / path.name)
    return config.archive


def _logins(config: Config) -> tuple[Login, Login]:
    coordinator = login_as(config, Role.COORDINATOR)
    has_operator = config.has_keys and (config.keys / f"{Role.OPERATOR}.key").exists()
    return coordinator, login_as(config, Role.OPERATOR) if has_operator else coordinator
