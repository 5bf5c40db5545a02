"""A head over a log that is gone, another one or shorter: it waits for a person, and makes no empty one by itself."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from tests.contracts.logs import facts, started
from tests.integration.head import UNICROND, config
from tests.integration.test_probes import answers, becomes, probe
from tests.integration.two_heads import two_heads
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
        await asyncio.wait_for(process.wait(), 60)


async def says(url: str, words: str) -> None:
    async with asyncio.timeout(60):
        while words not in str((await asyncio.to_thread(probe, f"{url}/readyz"))[1]["trouble"]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def known(directory: Path, seq: int, state: str = "state") -> None:
    async with asyncio.timeout(60):
        while (found := KnownLog(directory / state).read()) is None or found.mark is None or found.mark.seq < seq:  # noqa: ASYNC110  (another process writes it)
            await asyncio.sleep(0.05)


async def claim(connection: Connection, number: int) -> CoordinatorStarted:
    """The claim of that number, as soon as it is made. A head is ready before it has claimed."""
    async with asyncio.timeout(60), aclosing(NatsEventLog(connection).read()) as entries:
        async for entry in entries:
            if isinstance(entry, RecordedEvent) and isinstance(event := entry.envelope.event, CoordinatorStarted):
                number -= 1
                if not number:
                    return event
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
            first = await claim(connection, 1)
            assert first.adopted_us > 0, "agents are to see that a person wanted it"
            assert (await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["created"] != born
        async with head(path, nats) as url:  # the new one is the known one from now on
            await becomes(url, "/readyz", 200)
            second = await claim(connection, 2)
            assert second.adopted_us == first.adopted_us, "it is still the same order"
            begin = await anext(NatsEventLog(connection).read(until_seq=1))
            assert (first.log_began_us, second.log_began_us) == (0, begin.recorded_at_us)
    finally:
        await connection.close()


async def test_truncated_store_is_refused_until_order(tmp_path: Path, nats: EmbeddedServer) -> None:
    path = config(tmp_path)
    async with head(path, nats) as url:
        await becomes(url, "/readyz", 200)
        await known(tmp_path, 1)  # ready before it has claimed
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
        await says(url, "the event log ends at entry 1, and this head knows entry 2")
    async with head(path, nats, "--new-log") as url:
        await becomes(url, "/readyz", 200)


async def swapped(nats: EmbeddedServer, away: Path, here: Path) -> None:
    """The server's store goes `away`, and the one that lies `here` takes its place; none: an empty one."""
    await nats.kill()
    store = nats.directory / "store"
    store.rename(away)
    if here.exists():  # noqa: ASYNC240  (nothing else runs meanwhile)
        here.rename(store)  # noqa: ASYNC240
    await nats.start()


async def test_heads_end_where_another_store_is_served(tmp_path: Path, nats: EmbeddedServer) -> None:
    """Two heads work on a log, and the server comes back with the store of another, longer one: none of its entries is
    folded, nobody leads there, and both go on once the log is back."""
    connection = await connect(nats.url, name="test", timeout_s=10)
    log = NatsEventLog(connection)
    try:
        async with two_heads(tmp_path, {"url": nats.url}) as heads:
            for head in heads:
                await known(tmp_path / head.name, 1, "")
            await swapped(nats, tmp_path / "known", tmp_path / "none")
            await create_streams(connection)
            for term in range(1, 5):
                await log.claim_term(started(term))
                await log.append(facts(10 * term, 10 * term + 7))
            for head in heads:
                assert await asyncio.wait_for(head.process.wait(), 60) == 1
                assert "entry 1 of the event log is another than the one that this head knows: this head ends" in (
                    output := head.output.read_text()
                ), output
                assert "quarantined" not in output and output.count("took over at sequence") <= 1, output
            assert await log.last_seq() == 36, "nothing was written to it"
            for head in heads:
                await head.start()
                await head.until(lambda told: "entry 1 of the event log is another" in str(told.get("trouble")))
            await swapped(nats, tmp_path / "other", tmp_path / "known")
            term = (await order_of_terms(log))[-1]
            leading = [asyncio.create_task(head.leads()) for head in heads]
            await asyncio.wait(leading, return_when=asyncio.FIRST_COMPLETED)
            for task in leading:
                task.cancel()
            await asyncio.gather(*leading, return_exceptions=True)
            assert (await order_of_terms(log))[-1] == term + 1
    finally:
        await connection.close()


async def order_of_terms(log: NatsEventLog) -> list[int]:
    """The terms that were claimed, one after the other."""
    entries = [entry async for entry in log.read(until_seq=await log.last_seq())]
    events = [entry.envelope.event for entry in entries if isinstance(entry, RecordedEvent)]
    return [event.term for event in events if isinstance(event, CoordinatorStarted)]
