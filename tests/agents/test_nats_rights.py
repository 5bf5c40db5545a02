"""An agent with a key does all that it has to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from tests.contracts.logs import beat, command, decision, envelope_of, fact, history, started
from unicrond.agents.core.state import Remembered
from unicrond.agents.kubernetes.keeper import standing
from unicrond.agents.shell.duplicate_agent import DuplicateAgents, DuplicateWatch
from unicrond.agents.shell.event_log_guard import LogGuard
from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.log.log_identity import mark_of
from unicrond.events.log.subjects import EVENT_STREAM, WARRANT_HEADER
from unicrond.events.nats.commands import NatsCommandFeed, ensure_command_consumer
from unicrond.events.nats.connection import Connection, Login, PublishDenied, connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, create_streams
from unicrond.events.nats.terms import Terms
from unicrond.events.queries.worker_queries import ANSWERS, answer_subject, logs_subject
from unicrond.events.trust.keys import load_or_create_key
from unicrond.events.trust.logins import Role
from unicrond.events.vocabulary import CoordinatorStarted, NodeIsolated, NodeJoined, NodeReadmitted, StoreAddress
from unicrond.events.wire.envelope import RecordedEvent

_NODE = "gpu07"
_LOGINS = (Role.OPERATOR, Role.COORDINATOR, Role.API, f"agent-{_NODE}")


class Links(NamedTuple):
    """A connection of each login."""

    operator: Connection
    head: Connection
    api: Connection
    agent: Connection


@pytest.fixture
async def links(tmp_path: Path) -> AsyncIterator[Links]:
    server = EmbeddedServer(tmp_path / "nats", users=[load_or_create_key(tmp_path, login).user for login in _LOGINS])
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


async def test_agent_key_grants_all_needed_rights(links: Links) -> None:
    head, agent = links.head, links.agent
    log = NatsEventLog(head, extra_headers=lambda _: {WARRANT_HEADER: "a warrant"})
    async with asyncio.timeout(20):
        fence = await log.claim_term(started(1))
        claims: list[CoordinatorStarted] = []
        terms = Terms(agent, claims.append)
        await terms.ask()
        assert [claim.term for claim in claims] == [1]
        guard = LogGuard(agent, terms, Remembered, lambda: 0, lambda: False)
        seen = await guard.wait_for_log()
        assert seen.created and (seen.last_seq, seen.term) == (1, 1)
        assert seen.marks == tuple(mark_of(entry) for entry in await history(log)), "what its login may see of it"

        heard: asyncio.Queue[str] = asyncio.Queue()

        async def listen() -> None:
            async for entry in NatsBeatLog(head).subscribe():
                heard.put_nowait(envelope_of(entry).producer)

        async def beats() -> None:
            for number in range(1, 1000):
                await NatsBeatLog(agent).publish(beat(number, _NODE))
                await asyncio.sleep(0.02)

        work = [asyncio.create_task(each) for each in (listen(), beats())]
        assert await heard.get() == _NODE
        outrun: asyncio.Queue[int] = asyncio.Queue()
        watch = DuplicateWatch(
            agent, _NODE, DuplicateAgents(1, 0, 0.1), asyncio.Event(), lambda _: None, outrun.put_nowait
        )
        work.append(asyncio.create_task(watch.run()))
        can_beat = asyncio.Event()
        can_beat.set()
        await watch.alone(can_beat)

        assert await NatsEventLog(agent).append([fact(1, _NODE)])
        await NatsEventLog(agent).append([replace(fact(2, _NODE), event=_joined(2))])
        assert await outrun.get() == 2, "a newer join of its name is heard, not looked for"
        assert await standing(agent, _NODE) == (None, "")
        for number, event in enumerate(
            (
                NodeIsolated(node=_NODE, until_us=None, reason="a GPU is broken"),
                NodeReadmitted(node=_NODE, reason="it passed"),
            ),
            100,
        ):
            await log.append([decision(number, event)], fence=fence)
            isolated = isinstance(event, NodeIsolated)
            assert await standing(agent, _NODE) == (isolated, "a GPU is broken" if isolated else "")
        feed = NatsCommandFeed(agent, _NODE, makes_consumer=False)
        await ensure_command_consumer(head, _NODE, ["big"])
        await feed.follow(["big"])
        await log.append([command(1, _NODE)], fence=fence)
        async for recorded in feed.read():
            assert isinstance(recorded, RecordedEvent) and recorded.warrant == "a warrant"
            break
        following = asyncio.create_task(feed.follow(["small"]))
        await asyncio.sleep(0.2)
        assert not following.done(), "the coordinator has not prepared it yet"
        await ensure_command_consumer(head, _NODE, ["small"])
        await following

        async def serve(message: object) -> None:
            await message.respond(b"a log")  # type: ignore[attr-defined]  # a nats Msg

        await agent.subscribe(logs_subject(_NODE), serve)
        for _ in range(2):  # the first ping may overtake the subscription
            await (await agent.session()).client.flush()
        answers: asyncio.Queue[bytes] = asyncio.Queue()

        async def answered(message: object) -> None:
            answers.put_nowait(message.data)  # type: ignore[attr-defined]  # a nats Msg

        await links.api.subscribe(ANSWERS, answered)
        await (await links.api.session()).publish(logs_subject(_NODE), b"", reply=answer_subject(_NODE, "1"))
        assert await answers.get() == b"a log"
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


def _joined(boot: int) -> NodeJoined:
    store = StoreAddress(host="127.0.0.1", port=1)
    return NodeJoined(node=_NODE, address="127.0.0.1", slots=1, store=store, agent_boot=boot, version="1", workers=())


async def test_agent_key_refuses_other_rights_at_once(links: Links) -> None:
    """All that it may not: tests/events/test_forgery.py."""
    for denied in (f"STREAM.MSG.GET.{EVENT_STREAM}", f"STREAM.DELETE.{EVENT_STREAM}"):
        with pytest.raises(PublishDenied):
            await api(links.agent, denied, {"seq": 1})
    other = NatsEventLog(links.agent, give_up_s=0.5)
    for envelope in (fact(1, "n2"), command(1, _NODE)):
        with pytest.raises(LogUnavailable):
            await other.append([envelope])
