"""Over a real server: an agent says of a command that it cannot read it, and hears which coordinator there is."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import msgpack
import pytest

from tests.contracts.logs import command, started
from unicrond.events.log.subjects import TERM_SUBJECT
from unicrond.events.nats.commands import NatsCommandFeed, UnreadCommand, unread_command
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.terms import Terms
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Envelope


def younger(envelope: Envelope, **more: Any) -> bytes:
    """A command as a younger version may write it."""
    wire = msgpack.unpackb(encode(envelope))
    wire["schema"] = 99
    wire["event"].update(more)
    return bytes(msgpack.packb(wire))


async def test_unreadable_command_is_answered_and_next_one_arrives(nats_connection: Connection) -> None:
    log = NatsEventLog(nats_connection)
    await log.append([command(1)])
    for body in (younger(command(2), type="PolishWorker", shine=3), younger(command(3), urgency=1), b"nonsense"):
        await nats_connection.request("unicron.v1.command.n1.StopWorker", body)
    await log.append([command(4)])
    unread: list[UnreadCommand] = []
    taken: list[int] = []
    async with asyncio.timeout(30):
        feed = NatsCommandFeed(nats_connection, "n1", on_unread=unread.append)
        async with aclosing(feed.read()) as commands:
            async for recorded in commands:
                taken.append(recorded.envelope.number)
                if len(taken) == 2:
                    break
    assert taken == [1, 4]
    assert [(order.command_id, order.event_id) for order in unread] == [
        ("1.1.n1.2", "coordinator-1-2"),
        ("1.1.n1.3", "coordinator-1-3"),
    ]
    assert all("schema" in order.reason for order in unread)


def test_unreadable_command_is_answered_only_by_its_node() -> None:
    body = younger(command(2), urgency=1)
    assert unread_command(body, "n1", "why") == UnreadCommand("1.1.n1.2", "coordinator-1-2", "why")
    assert unread_command(body, "n2", "why") is None
    assert unread_command(younger(command(2), command_id="9.1.n1.2"), "n1", "why") is None
    assert unread_command(younger(command(2), command_id=5), "n1", "why") is None
    assert unread_command(b"", "n1", "why") is None


async def test_terms_are_received_across_outages(nats_server: EmbeddedServer, nats_connection: Connection) -> None:
    log = NatsEventLog(nats_connection)
    heard: asyncio.Queue[CoordinatorStarted] = asyncio.Queue()
    terms = Terms(nats_connection, heard.put_nowait)
    async with asyncio.timeout(30):
        await terms.ask()
        assert heard.empty(), "nobody has claimed one"
        await log.claim_term(started(1))
        await terms.ask()
        assert (await heard.get()).term == 1
        following = asyncio.create_task(terms.follow())
        await log.claim_term(started(2))
        assert (await heard.get()).term == 2
        session = await nats_connection.session()
        await nats_server.restart()
        await session.disconnected.wait()
        await log.claim_term(started(3))
        assert (await heard.get()).term == 3
        session = await nats_connection.session()
        await session.publish(TERM_SUBJECT + "x", b"")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert heard.empty()


async def test_repeated_claims_and_noise_are_received_once(
    nats_connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """As another node can have NATS deliver them on the subject of the terms."""
    claims: asyncio.Queue[int] = asyncio.Queue()
    terms = Terms(nats_connection, lambda claim: claims.put_nowait(claim.term), lambda: claims.put_nowait(0))
    await NatsEventLog(nats_connection).claim_term(started(1))
    following = asyncio.create_task(terms.follow())
    async with asyncio.timeout(20):
        assert await claims.get() == 1, "it listens, and has asked"
        session = await nats_connection.session()
        for _ in range(5):
            await session.publish(TERM_SUBJECT, encode(started(2)))
            await session.publish(TERM_SUBJECT, b'{"stream":"UNICRON_EVENTS"}')
        await session.publish(TERM_SUBJECT, encode(started(3)))
        assert [await claims.get() for _ in range(4)] == [0, 2, 0, 3]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert len([record for record in caplog.records if "not a valid event" in record.message]) == 1
