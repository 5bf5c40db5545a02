"""A head over a log that is gone, made anew or shorter: it waits for a person, and makes no empty one by itself."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.head import UNICROND, config
from tests.integration.test_probes import answers, becomes, probe
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, create_streams
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.local.dev import free_port
from unicrond.service.event_log.known_event_log import KnownLog


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "nats", port=free_port(), dies_with_us=True)
    await server.start()
    yield server
    await server.stop()


def url_of(path: Path) -> str:
    return "http://127.0.0.1:" + path.read_text().split("api: {port: ")[1].split("}")[0]


@asynccontextmanager
async def head(path: Path, nats: EmbeddedServer, *more: str) -> AsyncIterator[str]:
    url = url_of(path)
    process = await asyncio.create_subprocess_exec(
        *(UNICROND, "run", "--config", str(path), "--nats", nats.url, *more), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await answers(url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 20)


async def says(url: str, words: str) -> None:
    async with asyncio.timeout(30):
        while words not in str((await asyncio.to_thread(probe, f"{url}/readyz"))[1]["trouble"]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def known(directory: Path, seq: int) -> None:
    async with asyncio.timeout(20):
        while (found := KnownLog(directory / "state").read()) is None or found.mark is None or found.mark.seq < seq:  # noqa: ASYNC110  (another process writes it)
            await asyncio.sleep(0.05)


async def order(connection: Connection, claims: int) -> int:
    """When a person last took a log, as the claim of that number says it. A head is ready before it has claimed."""
    async with asyncio.timeout(20), aclosing(NatsEventLog(connection).read()) as entries:
        async for entry in entries:
            if isinstance(entry, RecordedEvent) and isinstance(event := entry.envelope.event, CoordinatorStarted):
                claims -= 1
                if not claims:
                    return event.adopted_us
    raise AssertionError("the log has ended")


async def test_missing_log_is_recreated_only_on_order(tmp_path: Path, nats: EmbeddedServer) -> None:
    path = config(tmp_path)
    connection = await connect(nats.url, name="test", timeout_s=10)
    try:
        async with head(path, nats) as url:
            await becomes(url, "/readyz", 200)
            await known(tmp_path, 1)
            born = (await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["created"]
            await api(connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
            await says(url, "NATS has no event log, and this head has read one of 1 entries; restore it, or")
            await create_streams(connection)  # as somebody's script might
            await says(url, "the coordinator has read")
            assert (await asyncio.to_thread(probe, f"{url}/healthz"))[1]["status"] == "stopped deciding"
            assert (await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["state"]["last_seq"] == 0
        await api(connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
        async with head(path, nats) as url:
            await says(url, "NATS has no event log, and this head knows one of")
            await asyncio.sleep(1)
            streams = (await api(connection, "STREAM.NAMES", {})).get("streams") or []
            assert EVENT_STREAM not in streams
        async with head(path, nats, "--new-log") as url:
            await becomes(url, "/readyz", 200)
            ordered_us = await order(connection, 1)
            assert ordered_us > 0, "agents are to see that a person wanted it"
            assert (await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["created"] != born
        async with head(path, nats) as url:  # the new one is the known one from now on
            await becomes(url, "/readyz", 200)
            assert await order(connection, 2) == ordered_us, "it is still the same order"
    finally:
        await connection.close()


async def test_truncated_store_is_refused_until_order(tmp_path: Path, nats: EmbeddedServer) -> None:
    path = config(tmp_path)
    async with head(path, nats) as url:
        await becomes(url, "/readyz", 200)
    await nats.stop()
    shutil.copytree(tmp_path / "nats", tmp_path / "older")
    await nats.start()
    async with head(path, nats) as url:  # a second term: the log has grown
        await becomes(url, "/readyz", 200)
        await known(tmp_path, 2)
    await nats.stop()
    shutil.rmtree(tmp_path / "nats")
    shutil.copytree(tmp_path / "older", tmp_path / "nats")
    await nats.start()
    async with head(path, nats) as url:
        await says(url, "the event log ends at entry 1, and this head has folded 2")
    async with head(path, nats, "--new-log") as url:
        await becomes(url, "/readyz", 200)
