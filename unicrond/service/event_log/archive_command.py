"""`unicrond archive`: copy the event log to the archive, and remove its older part from NATS if asked.

The coordinator's timer does the same in a process of its own (`main`), told by JSON on stdin (retention.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from unicrond.events.archive.archive import CannotTrim, TermTooOld, archive, trim
from unicrond.events.log.event_log import LogError
from unicrond.events.nats.connection import Login, connect
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.trust.logins import Role
from unicrond.intake.config import Config, login_as

CONNECT_TIMEOUT_S = 5.0


class ArchiveOutcome(msgspec.Struct, frozen=True):
    """What an archive run achieved: the archive holds entries 1 to `last_seq`, `copied` of them new, with `beats`
    heartbeats as evidence; `removed`: from NATS. `error`: why nothing was archived. `trim_error`: why nothing was
    removed though that was asked for; `term_too_old`: a coordinator must begin another term first."""

    last_seq: int = 0
    copied: int = 0
    beats: int = 0
    removed: int = 0
    error: str = ""
    trim_error: str = ""
    term_too_old: bool = False


class ArchiveRequest(NamedTuple):
    """What to do: archive, and trim what is older than `keep_s` (None: nothing)."""

    config: Config
    keep_s: float | None


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


async def run(config: Config, keep_s: float | None) -> ArchiveReport:
    """Archive, and trim what is older than `keep_s` (None: nothing); return the report. Raises LogError, OSError."""
    outcome = await work(ArchiveRequest(config, keep_s))
    report = ArchiveReport(str(config.archive), outcome.last_seq, outcome.copied)
    if outcome.trim_error:
        raise LogError(f"{report}; nothing removed: {outcome.trim_error}")
    return report if keep_s is None or not outcome.last_seq else report._replace(removed=outcome.removed)


async def work(request: ArchiveRequest) -> ArchiveOutcome:
    """Carry out the request and return its outcome. Raises LogError, OSError."""
    config, keep_s = request
    directory = config.archive
    url = config.nats.url or await _embedded_url(config)
    connection = await connect(url, name="unicrond-archive", login=_login(config), timeout_s=CONNECT_TIMEOUT_S)
    try:
        copy = await archive(connection, directory)
        outcome = ArchiveOutcome(copy.last_seq, copy.copied, copy.beats)
        if keep_s is None or not copy.last_seq:
            return outcome
        try:
            return msgspec.structs.replace(outcome, removed=await trim(connection, directory, keep_s))
        except CannotTrim as error:
            too_old = isinstance(error, TermTooOld)
            return msgspec.structs.replace(outcome, trim_error=str(error), term_too_old=too_old)
    finally:
        await connection.close()


def main() -> None:
    """Run the timer's process: it reads an `ArchiveRequest` from stdin and writes an `ArchiveOutcome` to stdout."""
    os.nice(10)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ArchiveRequest)
    try:
        outcome = asyncio.run(work(request))
    except (LogError, OSError) as error:
        outcome = ArchiveOutcome(error=" ".join(str(error).split()))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


def _login(config: Config) -> Login:
    """Return the operator's login; a head with servers of its own may lack that key, and then only archives."""
    has_operator = not config.has_keys or (config.keys / f"{Role.OPERATOR}.key").exists()
    return login_as(config, Role.OPERATOR if has_operator else Role.COORDINATOR)


async def _embedded_url(config: Config) -> str:
    server = EmbeddedServer(Path(config.state_dir) / "nats", host=config.nats.host, users=())
    if not await server.adopt():
        raise LogError(f"{server.directory}: no nats-server runs there; start unicrond, or give --nats URL")
    return server.url
