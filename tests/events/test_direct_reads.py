"""Reading by direct gets is reading: the same messages as by a consumer, also where somebody lies in headers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.contracts.logs import facts
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats import direct_reads
from unicrond.events.nats.connection import Connection, Login, NoReply, PublishDenied, connect
from unicrond.events.nats.direct_reads import DirectReads
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.reader import read_stream
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.stored_message import StoredMessage
from unicrond.events.nats.streams import api, consumers_of, create_streams
from unicrond.events.trust.keys import load_or_create_key
from unicrond.events.trust.logins import Role
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.service.coordinator.nats_snapshots import NatsSnapshotStore

_LOGINS = (Role.OPERATOR, Role.COORDINATOR, Role.READER, "agent-n1")


class Links(NamedTuple):
    """A connection of each login."""

    operator: Connection
    head: Connection
    reader: Connection
    agent: Connection


@pytest.fixture
async def links(tmp_path: Path) -> AsyncIterator[Links]:
    users = [load_or_create_key(tmp_path, login).user for login in _LOGINS]
    server = EmbeddedServer(tmp_path / "nats", users=users, dies_with_us=True)
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.kill)
        opened = []
        for login in _LOGINS:
            key = Login(key=tmp_path / f"{login}.key")
            opened.append(await connect(server.url, name=login, login=key, timeout_s=10))
            stack.push_async_callback(opened[-1].close)
        await create_streams(opened[0])
        yield Links(*opened)


async def first(connection: Connection, count: int) -> list[StoredMessage]:
    start = {"deliver_policy": "all"}
    async with asyncio.timeout(20), aclosing(read_stream(connection, EVENT_STREAM, start=start)) as messages:
        return [await anext(messages) for _ in range(count)]


async def test_direct_reads_equal_those_of_a_consumer(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_reads, "BATCH", 7)
    await NatsEventLog(links.agent).append(facts(1, 25))
    messages = await first(links.reader, 25)
    assert not await consumers_of(links.operator, EVENT_STREAM)
    assert messages == await first(links.operator, 25)
    with pytest.raises(PublishDenied):
        await api(links.reader, f"CONSUMER.CREATE.{EVENT_STREAM}.reader-0", {})


async def test_reader_follows_what_is_appended(links: Links) -> None:
    log = NatsEventLog(links.agent)
    await log.append(facts(1, 2))
    async with asyncio.timeout(20), aclosing(NatsEventLog(links.reader).read(1)) as entries:
        assert (await anext(entries)).seq == 2
        waiting = asyncio.create_task(anext(entries))
        await log.append(facts(3, 3))
        entry = await waiting
        assert isinstance(entry, RecordedEvent) and entry.seq == 3


async def test_writer_cannot_end_a_read_by_its_headers(links: Links) -> None:
    """A message whose first line is a status, or that names another sequence, is a message like any other."""
    session = await links.agent.session()
    await NatsEventLog(links.agent).append(facts(1, 1))
    lies = {"Nats-Sequence": "99", "Nats-Last-Sequence": "98", "Nats-Num-Pending": "0", "Nats-Time-Stamp": "never"}
    subject = "unicron.v1.obs.n1.X"
    await session.publish(subject, b"x", lies)
    for status in (b"404 Message Not Found", b"204 EOB", b"503"):
        headers = b"NATS/1.0 " + status + b"\r\n\r\n"
        line = b"HPUB %b %d %d\r\n%b\r\n" % (subject.encode(), len(headers), len(headers) + 1, headers + b"x")
        session.client._transport.write(line)
    await session.client.flush()
    await NatsEventLog(links.agent).append(facts(2, 2))
    messages = await first(links.reader, 6)
    assert [message.seq for message in messages] == [1, 2, 3, 4, 5, 6]
    assert messages == await first(links.operator, 6)


async def test_snapshot_is_read_whole_by_a_reader(links: Links) -> None:
    assert await NatsSnapshotStore(links.reader).load() is None
    body = os.urandom(700_000)  # several chunks
    await NatsSnapshotStore(links.head).save(b"older")
    await NatsSnapshotStore(links.head).save(body)
    assert await NatsSnapshotStore(links.reader).load() == body
    assert await NatsSnapshotStore(links.head).load() == body


async def test_lost_connection_ends_a_read(links: Links) -> None:
    session = await links.reader.session()
    reads = DirectReads(session, EVENT_STREAM)
    await reads.open()
    waiting = asyncio.create_task(anext(reads.follow(1, lambda: None)))
    await asyncio.sleep(0)
    await session.close()
    with pytest.raises(NoReply):
        await asyncio.wait_for(waiting, 30)
    await reads.close()
