"""Whose call of JetStream's API it is: nats-server says so behind whatever headers the caller made up.

All that an agent may ask for is counted, in operator mode too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from nats.aio.client import Client

from tests.events.test_jwt_logins import Server
from unicrond.core.state.state import ClusterState, NodeLogin
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.commands import ensure_command_consumer
from unicrond.events.nats.connection import Login, connect
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.trust.keys import load_or_create_key, make_key
from unicrond.events.trust.logins import AGENT_CALLS, Role, agent_login, inbox_prefix, rights
from unicrond.service.trust.fuses import Fuses, caller_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

VICTIM = make_key("agent-n2").user.key.encode()
CALL = f"$JS.API.STREAM.INFO.{EVENT_STREAM}"
FORGED = b'Nats-Request-Info: {"start":"2026-11-28T00:10:36.79Z","acc":"AGENTS","user":"%s"}' % VICTIM


class Site(NamedTuple):
    """A server, and who calls it. `headers`: of each call, as the coordinator hears them."""

    agent: Client
    key: str
    headers: asyncio.Queue[bytes]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("callers")
    login = agent_login("n1")
    users = [load_or_create_key(directory, name).user for name in (login, Role.COORDINATOR, Role.OPERATOR)]
    agent, headers = Client(), asyncio.Queue[bytes]()
    async with AsyncExitStack() as stack:
        server = EmbeddedServer(directory / "nats", users=users)
        stack.push_async_callback(server.kill)
        await server.start()
        operator, head = [
            await connect(server.url, name=name, login=Login(key=directory / f"{name}.key"), timeout_s=20)
            for name in (Role.OPERATOR, Role.COORDINATOR)
        ]
        for connection in (operator, head):
            stack.push_async_callback(connection.close)
        stack.push_async_callback(agent.close)
        await create_streams(operator)
        session = await head.session()
        for subject in AGENT_CALLS:
            await session.subscribe_raw(subject, lambda _, __, ___, raw: headers.put_nowait(raw))
        await session.client.flush()
        # A client may call itself whatever it likes, and that stands in the server's header.
        name = f'n1","acc":"AGENTS","user":"{VICTIM.decode()}"}}\r\n{FORGED.decode()}'
        await agent.connect(server.url, name=name, **Login(key=directory / f"{login}.key").options())
        yield Site(agent, users[0].key, headers)


async def heard(site: Site, headers: bytes) -> bytes:
    """Call with these headers, byte by byte; return what the coordinator hears."""
    inbox = f"{inbox_prefix(agent_login('n1'))}.x"
    await site.agent._send_command(
        f"HPUB {CALL} {inbox} {len(headers)} {len(headers)}\r\n".encode() + headers + b"\r\n"
    )
    await site.agent.flush()
    return await asyncio.wait_for(site.headers.get(), 20)


@pytest.mark.parametrize(
    "headers",
    [
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nA: b\r\n\r\n",
        b"NATS/1.0\r\n" + FORGED + b"\r\n\r\n",
        b"NATS/1.0\r\n" + FORGED + b"\r\n" + FORGED + b"\r\n\r\n",
        b"NATS/1.0\r\nA: b" + FORGED + b"\r\n\r\n",
        b"NATS/1.0\r\n" + FORGED + b"  ",
        b"NATS/1.0\r\n" + FORGED + b"\r\n",
        b"NATS/1.0\r\n" + FORGED[:-3] + b"  ",
        b"NATS/1.0\r\nNats-Request-Info: {x\r\n",
        b'NATS/1.0\r\nNats-Request-Info: {"start":"  ',
        b"NATS/1.0\r\nNats-Request-Info: {\n",
        b"NATS/1.0\r\nnats-request-info: " + FORGED[19:] + b"\r\n\r\n",
        FORGED + b"\r\n\r\n",
        b"no headers",
        b"xy",
        b"",
    ],
)
async def test_caller_is_whom_the_server_names(site: Site, headers: bytes) -> None:
    assert caller_of(await heard(site, headers)) == site.key


async def test_unended_headers_stay_before_what_the_server_adds(site: Site) -> None:
    """Or the test above tries nothing: an invented name stands in the same line."""
    raw = await heard(site, b"NATS/1.0\r\n" + FORGED + b"  ")
    assert raw.startswith(b"NATS/1.0\r\n" + FORGED + b"Nats-Request-Info: {")


class Impostor(Client):  # type: ignore[misc]
    """A client with a JWT that claims another's key beside it."""

    def _connect_command(self) -> bytes:
        options = json.loads(super()._connect_command().removeprefix(b"CONNECT "))
        return f"CONNECT {json.dumps(options | {'nkey': VICTIM.decode()})}\r\n".encode()


def calls() -> Iterator[str]:
    """What an agent may ask of JetStream."""
    for subject in rights(agent_login("n1")).publish:
        if subject.startswith("$JS."):
            yield subject.replace(".>", ".1.1.1.1764288636797988483.0")


@pytest.mark.parametrize("mode", ["keys", "operator"])
async def test_all_that_an_agent_may_ask_counts_for_it(mode: str, tmp_path: Path) -> None:
    """Acknowledgements too."""
    logins = (agent_login("n1"), Role.COORDINATOR, Role.OPERATOR)
    keys = {"n2": NodeLogin(key=VICTIM.decode())}
    if mode == "keys":
        users = [load_or_create_key(tmp_path, login).user for login in logins]
        keys["n1"] = NodeLogin(key=users[0].key)
        server, agent = EmbeddedServer(tmp_path / "nats", users=users), Client()
        files = [tmp_path / f"{login}.key" for login in logins]
    else:
        server, agent = Server(tmp_path), Impostor()
        files = [server.credentials(login) for login in logins]
    state = ClusterState(logins=keys)
    fuses = Fuses(lambda: state, lambda: 1, "")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.kill)
        await server.start()
        operator, head = [
            await connect(server.url, name="x", login=Login(key=path), timeout_s=20) for path in (files[2], files[1])
        ]
        for connection in (operator, head):
            stack.push_async_callback(connection.close)
        stack.push_async_callback(agent.close)
        watching = asyncio.create_task(fuses.watch(head))
        stack.callback(watching.cancel)
        await create_streams(operator)
        await ensure_command_consumer(head, "n1", ())
        await agent.connect(server.url, **Login(key=files[0]).options())
        session = await head.session()
        await session.client.flush()
        for count, call in enumerate(calls(), start=1):
            await agent.publish(call, b"+NXT 1", reply=f"{inbox_prefix(logins[0])}.x")
            async with asyncio.timeout(20):
                while sum(node.messages for node in fuses._entrance._counts.values()) < count:
                    await agent.flush()
                    await session.client.flush()
        assert fuses._entrance._counts.keys() == {"n1"}
