"""What an agent may say at most: the server and the head let all of it in, at the pace of its outbox."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.contracts.logs import started
from unicrond.agents.shell.outbox import Outbox
from unicrond.core.state.state import ClusterState, NodeLogin
from unicrond.events.log.entrance import PACE_KIB, heard_bytes, sent_bytes
from unicrond.events.log.event_log import Fence
from unicrond.events.log.subjects import headers
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.trust.keys import load_or_create_key
from unicrond.events.trust.logins import Role, agent_login
from unicrond.events.vocabulary import PeersRemembered, Request
from unicrond.events.wire.codec import MAX_EVENT_BYTES, encode
from unicrond.events.wire.envelope import Envelope
from unicrond.replay.simulation.faults.boundary_events import KINDS, LONG, SHORT, Edges
from unicrond.service.trust.fuses import Fuses

NODE = "n1"
LENGTHS = (LONG, (40_000,), (6_000,), (1_024,), (256,), SHORT)
OBSERVATIONS = [kind for kind in KINDS if not issubclass(kind, Request)]


def largest() -> list[Envelope]:
    """The largest of many valid observations of each type. Some are valid with few items alone."""
    workers, draw = [f"t0.{number}" for number in range(8)], random.Random(7)
    sources = [Edges(draw, [NODE], ["t0"], workers, lengths) for lengths in LENGTHS]
    envelopes = []
    for kind in OBSERVATIONS:
        drawn = [source.envelope(kind) for source in sources for _ in range(60 if source.lengths is SHORT else 6)]
        own = [envelope for envelope in drawn if envelope is not None and envelope.producer == NODE]
        envelopes.append(max(own, key=lambda envelope: len(encode(envelope))))
    peers = tuple(f"n{number:062}" for number in range(MAX_EVENT_BYTES // 66))
    whole = PeersRemembered(node=NODE, task="t0", peers=peers)  # no event is larger
    return [*envelopes, Envelope(producer=NODE, boot=1, number=1, observed_at_us=1, event=whole)]


@pytest.mark.timeout(240)
async def test_largest_of_each_observation_is_stored_and_is_no_flood(tmp_path: Path) -> None:
    logins = (agent_login(NODE), Role.COORDINATOR, Role.OPERATOR)
    users = [load_or_create_key(tmp_path, login).user for login in logins]
    server = EmbeddedServer(tmp_path / "nats", users=users, dies_with_us=True)
    await server.start()
    connections: list[Connection] = []
    tasks: list[asyncio.Task[None]] = []
    for login in logins:
        key = Login(key=tmp_path / f"{login}.key")
        connections.append(await connect(server.url, name=login, login=key, timeout_s=20))
    agent, head, operator = connections
    state = ClusterState(logins={NODE: NodeLogin(key=users[0].key)})
    fuses = Fuses(lambda: state, lambda: time.monotonic_ns() // 1000, "")
    heard: dict[bytes, int] = {}
    try:
        await create_streams(operator)
        assert isinstance(await NatsEventLog(head).claim_term(started(1)), Fence)
        session = await head.session()

        def note(_: bytes, __: bytes, body: bytes, raw: bytes) -> None:
            heard[body] = heard_bytes(body, raw)

        await session.subscribe_raw(f"unicron.v1.obs.{NODE}.*", note)
        tasks.append(asyncio.create_task(fuses.watch(head)))
        for _ in range(2):  # nats-py may ask before it has sent the subscription
            await session.client.flush()
        outbox, sizes = Outbox(NODE, 1, lambda: 1), dict[bytes, int]()
        for envelope in largest():
            outbox.put(envelope.event)  # type: ignore[arg-type]  # an observation
            sent = outbox._items[-1]
            body = encode(sent.envelope)
            assert sent.size_bytes == sent_bytes(body, headers(sent.envelope))
            sizes[body] = sent.size_bytes
        assert max(sizes.values()) > 0.98 * MAX_EVENT_BYTES and sum(sizes.values()) > PACE_KIB.size * 1024, (
            "as large as can be"
        )
        tasks.append(asyncio.create_task(outbox.run(NatsEventLog(agent))))
        assert await outbox.drained(120), f"{len(outbox)} are not in the log"
        async with asyncio.timeout(20):
            while len(heard) < len(sizes):
                await session.client.flush()
        assert outbox.lost_count == 0 and heard.keys() == sizes.keys()
        assert all(heard[body] <= sizes[body] for body in sizes), "none counts for more than its agent has paid"
        assert fuses.look() == {} and fuses.alarms() == []
    finally:
        for task in tasks:
            task.cancel()
        for connection in connections:
            await connection.close()
        await server.kill()
