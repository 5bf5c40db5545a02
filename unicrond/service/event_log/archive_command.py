"""`unicrond archive`: copy the event log to the archive, and remove its older part from NATS if asked.

The head that leads has a process of its own follow the log (`main`): it is told by lines of JSON on stdin, ends with
that, and tells by lines on stdout (retention.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from unicrond.events.archive.archive import CannotTrim, TermTooOld, archive, trim
from unicrond.events.archive.follower import ArchiveFollower, ArchiveResult
from unicrond.events.log.event_log import LogError
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.trust.logins import Role
from unicrond.intake.config import Config, login_as

CONNECT_TIMEOUT_S = 5.0
#: Behind what the head and its NATS server do.
NICE = 10
MAX_LINE_BYTES = 1 << 20
#: How soon a following that has failed is begun again, and how long one may take to end.
AGAIN_S = 1.0
STOP_S = 5.0


class ArchiveOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome since the one before: the archive holds entries 1 to `last_seq`, `copied` of them new, with
    `beats` heartbeats as evidence; `removed`: from NATS. `error`: why nothing was archived. `is_trim`: this is the end
    of a trim; `trim_error`: why it removed nothing; `term_too_old`: a coordinator must begin another term first."""

    last_seq: int = 0
    copied: int = 0
    beats: int = 0
    removed: int = 0
    error: str = ""
    is_trim: bool = False
    trim_error: str = ""
    term_too_old: bool = False


class TrimOrder(msgspec.Struct, frozen=True):
    """An order to remove from NATS what is older than `keep_s` and stands in the archive."""

    keep_s: float


class ArchiveReport(NamedTuple):
    """The command's result, for people. `removed`: None where a trim was not asked for."""

    directory: str
    last_seq: int
    copied: int
    removed: int | None = None

    def __str__(self) -> str:
        if not self.last_seq:
            return "no log yet"
        text = f"{self.directory}: entries 1 to {self.last_seq}, {self.copied} of them new"
        return text if self.removed is None else f"{text}; {self.removed} removed from NATS"


async def run(config: Config, keep_s: float | None = None) -> ArchiveReport:
    """Archive, and trim what is older than `keep_s` (None: nothing); return the report. Raises LogError, OSError."""
    connection = await _connected(config)
    try:
        copy = await archive(connection, config.archive)
        report = ArchiveReport(str(config.archive), copy.last_seq, copy.copied)
        if keep_s is None or not copy.last_seq:
            return report
        try:
            return report._replace(removed=await trim(connection, config.archive, keep_s))
        except CannotTrim as error:
            raise LogError(f"{report}; nothing removed: {error}") from None
    finally:
        await connection.close()


def main() -> None:
    """Run the process that follows the log: it reads a `Config` and then `TrimOrder`s from stdin, a line each, and
    writes an `ArchiveOutcome` a line to stdout. It ends with stdin, once what it has read is written."""
    os.nice(NICE)
    asyncio.run(_serve())


async def _serve() -> None:
    orders = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    line = await orders.readline()
    if not line:
        return
    keeper = ArchiveKeeper(msgspec.json.decode(line, type=Config), _tell)
    keeping = asyncio.create_task(keeper.run())
    try:
        while line := await orders.readline():
            keeper.trim(msgspec.json.decode(line, type=TrimOrder).keep_s)
        keeper.stop()
        await asyncio.wait([keeping], timeout=STOP_S)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def _tell(outcome: ArchiveOutcome) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        pass  # the head has ended; so does stdin


class ArchiveKeeper:
    """Follows the log of a configuration, again and again, until `stop`; `tell` is called with each outcome."""

    def __init__(self, config: Config, tell: Callable[[ArchiveOutcome], object]) -> None:
        self._config = config
        self._tell = tell
        self._follower: ArchiveFollower | None = None
        self._stops = asyncio.Event()
        self._trims: asyncio.Queue[float] = asyncio.Queue()

    def stop(self) -> None:
        """Have `run` return once what was read is written."""
        self._stops.set()
        if self._follower is not None:
            self._follower.stop()

    def trim(self, keep_s: float) -> None:
        """Remove from NATS what is older than `keep_s`, beside the following."""
        self._trims.put_nowait(keep_s)

    async def run(self) -> None:
        """Follow until `stop`. What fails is told, and tried again."""
        while not self._stops.is_set():
            try:
                await self._follow()
            except (LogError, OSError) as error:
                self._tell(ArchiveOutcome(error=" ".join(str(error).split())))
            try:
                async with asyncio.timeout(AGAIN_S):
                    await self._stops.wait()
            except TimeoutError:
                pass

    async def _follow(self) -> None:
        connection = await _connected(self._config)
        trimming = asyncio.create_task(self._keep_trimming(connection))
        try:
            delay_s = self._config.log.archive_lag_s / 2
            self._follower = ArchiveFollower(connection, self._config.archive, delay_s, self._result)
            if self._stops.is_set():
                return
            await self._follower.follow()
        finally:
            self._follower = None
            trimming.cancel()
            await asyncio.gather(trimming, return_exceptions=True)
            await connection.close()

    async def _keep_trimming(self, connection: Connection) -> None:
        while True:
            keep_s = await self._trims.get()
            try:
                self._tell(ArchiveOutcome(is_trim=True, removed=await trim(connection, self._config.archive, keep_s)))
            except (LogError, OSError) as error:
                is_too_old = isinstance(error, TermTooOld)
                self._tell(ArchiveOutcome(is_trim=True, trim_error=str(error), term_too_old=is_too_old))

    def _result(self, result: ArchiveResult) -> None:
        self._tell(ArchiveOutcome(result.last_seq, result.copied, result.beats))


async def _connected(config: Config) -> Connection:
    """Connect with the operator's login; a head with servers of its own may lack that key, and then only archives."""
    url = config.nats.url or await _embedded_url(config)
    has_operator = not config.has_keys or (config.keys / f"{Role.OPERATOR}.key").exists()
    login = login_as(config, Role.OPERATOR if has_operator else Role.COORDINATOR)
    return await connect(url, name="unicrond-archive", login=login, timeout_s=CONNECT_TIMEOUT_S)


async def _embedded_url(config: Config) -> str:
    server = EmbeddedServer(Path(config.state_dir) / "nats", host=config.nats.host, users=())
    if not await server.adopt():
        raise LogError(f"{server.directory}: no nats-server runs there; start unicrond, or give --nats URL")
    return server.url
