"""What a head reads and writes only in the log that it knows, on every connection; a complete restore is that log."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from tests import nats_snapshots
from tests.contracts.logs import command, facts, started
from tests.integration.nats_cluster import nats_cluster
from unicrond.events.log.event_log import AnotherLog, LogUnavailable
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.log_proof import LogProof
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, create_streams
from unicrond.events.wire.envelope import Entry


async def created(connection: Connection) -> str:
    return str((await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["created"])


async def taken(entries: AsyncGenerator[Entry, None], count: int) -> list[int]:
    async with asyncio.timeout(20):
        return [(await anext(entries)).seq for _ in range(count)]


async def swapped(server: EmbeddedServer, away: Path, here: Path) -> None:
    """The server's store goes `away`, and the one that lies `here` takes its place; none: an empty one."""
    await server.kill()
    store = server.directory / "store"
    store.rename(away)
    if here.exists():  # noqa: ASYNC240  (nothing else runs meanwhile)
        here.rename(store)  # noqa: ASYNC240
    await server.start()


async def test_complete_restore_is_read_on(nats_connection: Connection) -> None:
    proof = LogProof()
    log = NatsEventLog(nats_connection, proof=proof)
    fence = await log.claim_term(started(1))
    async with aclosing(log.read()) as entries:
        await log.append(facts(1, 3), fence=fence)
        assert await taken(entries, 4) == [1, 2, 3, 4]
        born = await created(nats_connection)
        saved = await nats_snapshots.backup(nats_connection, EVENT_STREAM)
        await api(nats_connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
        await nats_snapshots.restore(nats_connection, saved)
        assert await created(nats_connection) != born
        begin_s = asyncio.get_running_loop().time()
        assert await log.append([command(1)], fence=fence) == [5]
        assert await taken(entries, 1) == [5]
        assert asyncio.get_running_loop().time() - begin_s < 5
    assert await proof.look(nats_connection) is None and proof.created != born


async def test_complete_restore_on_three_servers_is_read_on(tmp_path: Path) -> None:
    async with nats_cluster(tmp_path / "nats") as nats:
        connection = await connect(nats.urls, name="test", login=nats.login, timeout_s=60)
        try:
            await create_streams(connection, replicas=3)
            log = NatsEventLog(connection, proof=LogProof())
            fence = await log.claim_term(started(1))
            async with aclosing(log.read()) as entries:
                await log.append(facts(1, 3), fence=fence)
                assert await taken(entries, 4) == [1, 2, 3, 4]
                saved = await nats_snapshots.backup(connection, EVENT_STREAM)
                await api(connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
                await nats_snapshots.restore(connection, saved)
                assert await log.append([command(1)], fence=fence) == [5]
                assert await taken(entries, 1) == [5]
        finally:
            await connection.close()


@pytest.mark.parametrize("entries_there", [4, 9])
async def test_other_log_is_neither_read_nor_written(
    nats_server: EmbeddedServer, nats_connection: Connection, tmp_path: Path, entries_there: int
) -> None:
    """Another store is served on the same address. Its first claim stands where that of the known log does: the fence
    alone would let a decision pass."""
    proof = LogProof()
    log = NatsEventLog(nats_connection, proof=proof)
    fence = await log.claim_term(started(1))
    await log.append(facts(1, 3), fence=fence)
    async with aclosing(log.read()) as entries:
        assert await taken(entries, 4) == [1, 2, 3, 4]
        await swapped(nats_server, tmp_path / "kept", tmp_path / "none")
        other = await connect(nats_server.url, name="other", timeout_s=20)
        await create_streams(other)
        stranger = NatsEventLog(other)
        await stranger.claim_term(started(1))
        await stranger.append(facts(1, entries_there - 1))
        with pytest.raises(AnotherLog, match="entry 1 of the event log is another than the one that this head"):
            await taken(entries, 1)
    with pytest.raises(AnotherLog):
        await log.append([command(1)], fence=fence)
    with pytest.raises(AnotherLog):
        await log.claim_term(started(2))
    assert await stranger.last_seq() == entries_there
    await other.close()


async def test_shorter_log_is_waited_out(
    nats_server: EmbeddedServer, nats_connection: Connection, tmp_path: Path
) -> None:
    """An older copy of the store is served, and then the newer one again: no entry comes twice, and none of what was
    written to the older one."""
    log = NatsEventLog(nats_connection, proof=LogProof())
    await log.append(facts(1, 2))
    await nats_server.kill()
    shutil.copytree(nats_server.directory / "store", tmp_path / "older")
    await nats_server.start()
    async with aclosing(log.read()) as entries:
        await log.append(facts(3, 4))
        assert await taken(entries, 4) == [1, 2, 3, 4]
        await swapped(nats_server, tmp_path / "newer", tmp_path / "older")
        waiting = asyncio.ensure_future(anext(entries))
        other = await connect(nats_server.url, name="other", timeout_s=20)
        assert await NatsEventLog(other).append(facts(7, 7)) == [3]
        bounded = NatsEventLog(nats_connection, proof=log_proof(log), give_up_s=1.5)
        with pytest.raises(LogUnavailable):
            await bounded.append(facts(5, 6))
        assert not waiting.done()
        await swapped(nats_server, tmp_path / "rest", tmp_path / "newer")
        await log.append(facts(5, 6))
        async with asyncio.timeout(20):
            assert (await waiting).seq == 5
        await other.close()


def log_proof(log: NatsEventLog) -> LogProof:
    assert log._proof is not None
    return log._proof


async def test_grown_fork_is_another_log(
    nats_server: EmbeddedServer, nats_connection: Connection, tmp_path: Path
) -> None:
    """An older copy of the store that others have written to since: it is longer, and its beginning is the same."""
    log = NatsEventLog(nats_connection, proof=LogProof())
    await log.append(facts(1, 2))
    await nats_server.kill()
    shutil.copytree(nats_server.directory / "store", tmp_path / "older")
    await nats_server.start()
    async with aclosing(log.read()) as entries:
        await log.append(facts(3, 4))
        assert await taken(entries, 4) == [1, 2, 3, 4]
        await nats_server.kill()
        shutil.rmtree(nats_server.directory / "store")
        shutil.copytree(tmp_path / "older", nats_server.directory / "store")
        await nats_server.start()
        other = await connect(nats_server.url, name="other", timeout_s=20)
        await NatsEventLog(other).append(facts(11, 19))
        await other.close()
        with pytest.raises(AnotherLog, match="entry 4 of the event log is another"):
            await taken(entries, 1)
