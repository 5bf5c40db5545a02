"""Fixtures that many tests share. Each NATS test has a server of its own, on a free port."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.integration.object_store import S3Server, missing_packages
from tests.seeds import at_most
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams

# Started in the background of a shell without job control, a process inherits SIGINT as ignored, and so would
# every program that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Machines under load are slow, not wrong: no deadline per example.
settings.register_profile(
    "suite", max_examples=at_most(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


_LEVELS = {name: logging.getLogger(name).level for name in ("unicrond.events", "asyncio", "nats", "aiohttp")}


@pytest.fixture(autouse=True)
def levels_of_loggers() -> None:
    """Commands that a test or a module's fixture runs in this process set the levels of loggers; the next test wants
    them as they were."""
    for name, level in _LEVELS.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server, which this process and its children find in their environment."""
    if reason := missing_packages():
        pytest.skip(reason)
    with S3Server() as server, pytest.MonkeyPatch.context() as environment:
        for name, value in server.environment.items():
            environment.setenv(name, value)
        yield server


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A nats-server with a store of its own; killed by its pid at the end, however often it was restarted."""
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


@pytest.fixture
async def nats_connection(nats_server: EmbeddedServer) -> AsyncIterator[Connection]:
    """A connection to `nats_server`, with the streams created."""
    connection = await connect(nats_server.url, name="test", timeout_s=10)
    try:
        await create_streams(connection)
        yield connection
    finally:
        await connection.close()
