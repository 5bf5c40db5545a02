"""`unicrond archive`: copy the event log's older part to <state_dir>/archive, and remove it from NATS if asked."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from events.archive import CannotTrim, archive, trim
from events.log import LogError
from events.nats_connection import connect
from events.nats_server import EmbeddedServer
from unicrond.config import Config, login

_SPAN = re.compile(r"([0-9]{1,6})(h|d)")
_UNITS_S = {"h": 3600.0, "d": 86400.0}
CONNECT_TIMEOUT_S = 5.0


def archive_directory(config: Config) -> Path:
    """Where the coordinator of this configuration looks for the older part of its log."""
    return Path(config.state_dir) / "archive"


def keep_argument(text: str) -> float:
    """A span like 12h or 30d, in seconds."""
    span = _SPAN.fullmatch(text)
    if span is None or not int(span[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no span; give one like 12h or 30d")
    return int(span[1]) * _UNITS_S[span[2]]


async def run(config: Config, keep_s: float | None) -> str:
    """Archive, and trim what is older than `keep_s` (None: nothing). What was done, in one line. LogError."""
    directory = archive_directory(config)
    url = config.nats.url or await _embedded_url(config)
    connection = await connect(url, name="unicrond-archive", login=login(config.nats), timeout_s=CONNECT_TIMEOUT_S)
    try:
        held = await archive(connection, directory)
        told = (
            f"{directory}: entries 1 to {held.last_seq}, {held.copied} of them new" if held.last_seq else "no log yet"
        )
        if keep_s is None or not held.last_seq:
            return told
        try:
            return f"{told}; {await trim(connection, directory, keep_s)} removed from NATS"
        except CannotTrim as error:
            raise LogError(f"{told}; nothing removed: {error}") from None
    finally:
        await connection.close()


async def _embedded_url(config: Config) -> str:
    server = EmbeddedServer(Path(config.state_dir) / "nats", host=config.nats.host, login=login(config.nats))
    if not await server.adopt():
        raise LogError(f"{server.directory}: no nats-server runs there; start unicrond, or give --nats URL")
    return server.url
