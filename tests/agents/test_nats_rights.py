"""An agent with the narrow rights of docs/operate/install.md does all that it has to, and no more."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agents.log_identity import log_identity
from agents.namesakes import Namesakes, NamesakeWatch
from events.envelope import Recorded
from events.log import LogUnavailable
from events.logs_request import logs_subject
from events.nats_commands import NatsCommandFeed
from events.nats_connection import Connection, Login, Unanswered, connect
from events.nats_log import NatsBeatLog, NatsEventLog
from events.nats_server import EmbeddedServer
from events.nats_streams import create_streams
from events.nats_terms import Terms
from events.vocabulary import CoordinatorStarted
from tests.contracts.logs import beat, command, envelope_of, fact, started

_DOCUMENT = Path(__file__).parents[2] / "docs" / "operate" / "install.md"
_NODE = "gpu07"


class _Server(EmbeddedServer):
    """One with the document's user and one who may do everything."""

    def _write_config(self) -> None:
        super()._write_config()
        (users,) = re.findall(r"^```\n(\{ user: .*?)^```$", _DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
        narrow = users.replace("$GPU07", "narrow")
        with self._config_path.open("a") as file:
            file.write(f"authorization {{ users: [ {{ user: head, password: head }}\n{narrow} ] }}\n")


@pytest.fixture
async def connections(tmp_path: Path) -> AsyncIterator[tuple[Connection, Connection]]:
    """The head's and the agent's."""
    server = _Server(tmp_path / "nats")
    await server.start()
    head = await connect(server.url, name="head", login=Login(user="head", password="head"), timeout_s=10)
    agent = await connect(server.url, name="agent", login=Login(user=_NODE, password="narrow"), timeout_s=10)
    try:
        await create_streams(head)
        yield head, agent
    finally:
        await agent.close()
        await head.close()
        await server.kill()


async def test_an_agent_works_with_the_rights_of_the_document(connections: tuple[Connection, Connection]) -> None:
    head, agent = connections
    log = NatsEventLog(head)
    async with asyncio.timeout(20):
        fence = await log.claim_term(started(1))
        claims: list[CoordinatorStarted] = []
        terms = Terms(agent, claims.append)
        await terms.ask()
        assert [claim.term for claim in claims] == [1]
        assert await log_identity(agent)

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
        watch = NamesakeWatch(agent, _NODE, Namesakes(1, 0, 0.1), lambda _: None, lambda _: None)
        work.append(asyncio.create_task(watch.run()))
        can_beat = asyncio.Event()
        can_beat.set()
        await watch.alone(can_beat)

        assert await NatsEventLog(agent).append([fact(1, _NODE)])
        feed = NatsCommandFeed(agent, _NODE)
        await feed.follow(["big"])
        await log.append([command(1, _NODE)], fence=fence)
        async for recorded in feed.read():
            assert isinstance(recorded, Recorded)
            break
        await feed.follow(["small"])

        async def serve(message: object) -> None:
            await message.respond(b"a log")  # type: ignore[attr-defined]  # a nats Msg

        await agent.subscribe(logs_subject(_NODE), serve)
        await (await agent.session()).client.flush()
        assert (await head.request(logs_subject(_NODE), b"")).data == b"a log"
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def test_it_cannot_write_as_another_nor_command(connections: tuple[Connection, Connection]) -> None:
    _, agent = connections
    other = NatsEventLog(agent, give_up_s=0.5)
    for envelope in (fact(1, "n2"), command(1, _NODE)):
        with pytest.raises(LogUnavailable):
            await other.append([envelope])
    with pytest.raises(Unanswered):
        await agent.request("$JS.API.STREAM.DELETE.UNICRON_EVENTS", b"", timeout_s=0.3)
