"""`unicrond archive`: copy the event log to the archive, and remove its older part from NATS if asked.

The coordinator's timer does the same in a process of its own (`main`), told by JSON on stdin (log_life.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from events.archive import CannotTrim, TermTooOld, archive, trim
from events.log import LogError
from events.logins import Role
from events.nats_connection import Login, connect
from events.nats_server import EmbeddedServer
from unicrond.intake.config import Config, login_as

CONNECT_TIMEOUT_S = 5.0


class Outcome(msgspec.Struct, frozen=True):
    """The archive holds entries 1 to `last_seq`, `copied` of them new, with `beats` heartbeats as evidence; `removed`:
    from NATS. `error`: why nothing was archived. `trim_error`: why nothing was removed though it was asked for;
    `term_too_old`: a coordinator must begin another term first."""

    last_seq: int = 0
    copied: int = 0
    beats: int = 0
    removed: int = 0
    error: str = ""
    trim_error: str = ""
    term_too_old: bool = False


class Asked(NamedTuple):
    """What to do: archive, and trim what is older than `keep_s` (None: nothing)."""

    config: Config
    keep_s: float | None


class Done(NamedTuple):
    """What the command did. `removed`: None where it was not asked for."""

    directory: str
    last_seq: int
    copied: int
    removed: int | None = None

    def __str__(self) -> str:
        if not self.last_seq:
            return "no log yet"
        told = f"{self.directory}: entries 1 to {self.last_seq}, {self.copied} of them new"
        return told if self.removed is None else f"{told}; {self.removed} removed from NATS"


async def run(config: Config, keep_s: float | None) -> Done:
    """Archive, and trim what is older than `keep_s` (None: nothing). Raises LogError, OSError."""
    outcome = await work(Asked(config, keep_s))
    done = Done(str(config.archive), outcome.last_seq, outcome.copied)
    if outcome.trim_error:
        raise LogError(f"{done}; nothing removed: {outcome.trim_error}")
    return done if keep_s is None or not outcome.last_seq else done._replace(removed=outcome.removed)


async def work(asked: Asked) -> Outcome:
    """Do it. Raises LogError, OSError."""
    config, keep_s = asked
    directory = config.archive
    url = config.nats.url or await _embedded_url(config)
    connection = await connect(url, name="unicrond-archive", login=_login(config), timeout_s=CONNECT_TIMEOUT_S)
    try:
        held = await archive(connection, directory)
        outcome = Outcome(held.last_seq, held.copied, held.beats)
        if keep_s is None or not held.last_seq:
            return outcome
        try:
            return msgspec.structs.replace(outcome, removed=await trim(connection, directory, keep_s))
        except CannotTrim as error:
            too_old = isinstance(error, TermTooOld)
            return msgspec.structs.replace(outcome, trim_error=str(error), term_too_old=too_old)
    finally:
        await connection.close()


def main() -> None:
    """The timer's process: an `Asked` on stdin, an `Outcome` on stdout."""
    os.nice(10)
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    try:
        outcome = asyncio.run(work(asked))
    except (LogError, OSError) as error:
        outcome = Outcome(error=" ".join(str(error).split()))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


def _login(config: Config) -> Login:
    """The operator's; a head with servers of its own may lack that key, and then only archives."""
    has_operator = not config.nats.has_keys or (config.keys / f"{Role.OPERATOR}.key").exists()
    return login_as(config, Role.OPERATOR if has_operator else Role.COORDINATOR)


async def _embedded_url(config: Config) -> str:
    server = EmbeddedServer(Path(config.state_dir) / "nats", host=config.nats.host, users=())
    if not await server.adopt():
        raise LogError(f"{server.directory}: no nats-server runs there; start unicrond, or give --nats URL")
    return server.url
