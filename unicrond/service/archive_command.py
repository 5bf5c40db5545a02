"""`unicrond archive`: copy the event log's older part to <state_dir>/archive, and remove it from NATS if asked."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from events.archive import CannotTrim, archive, trim
from events.log import LogError
from events.logins import Role
from events.nats_connection import connect
from events.nats_server import EmbeddedServer
from unicrond.intake.config import Config, login_as

CONNECT_TIMEOUT_S = 5.0


class Done(NamedTuple):
    """The archive holds entries 1 to `last_seq`, `copied` of them new; `removed`: from NATS, None: not asked for."""

    directory: str
    last_seq: int
    copied: int
    removed: int | None = None

    def __str__(self) -> str:
        if not self.last_seq:
            return "no log yet"
        told = f"{self.directory}: entries 1 to {self.last_seq}, {self.copied} of them new"
        return told if self.removed is None else f"{told}; {self.removed} removed from NATS"


def archive_directory(config: Config) -> Path:
    """Where the coordinator of this configuration looks for the older part of its log."""
    return Path(config.state_dir) / "archive"


async def run(config: Config, keep_s: float | None) -> Done:
    """Archive, and trim what is older than `keep_s` (None: nothing). Raises LogError, OSError."""
    directory = archive_directory(config)
    url = config.nats.url or await _embedded_url(config)
    connection = await connect(
        url, name="unicrond-archive", login=login_as(config, Role.OPERATOR), timeout_s=CONNECT_TIMEOUT_S
    )
    try:
        held = await archive(connection, directory)
        done = Done(str(directory), held.last_seq, held.copied)
        if keep_s is None or not held.last_seq:
            return done
        try:
            return done._replace(removed=await trim(connection, directory, keep_s))
        except CannotTrim as error:
            raise LogError(f"{done}; nothing removed: {error}") from None
    finally:
        await connection.close()


async def _embedded_url(config: Config) -> str:
    server = EmbeddedServer(Path(config.state_dir) / "nats", host=config.nats.host, users=())
    if not await server.adopt():
        raise LogError(f"{server.directory}: no nats-server runs there; start unicrond, or give --nats URL")
    return server.url
