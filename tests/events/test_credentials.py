"""Credentials change under a connection: it moves to what the server accepts, in either order, and loses nothing."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from tests.events.certified import Certified, served
from unicrond.events.nats import connection as connections
from unicrond.events.nats.addresses import Addresses
from unicrond.events.nats.connection import Connection, Login, LoginRefused, Session, connect
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.trust.keys import make_key, rewrite_key, write_key

WAIT_S = 60


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(connections, "MOVE_AGAIN_S", 0.05)


async def another(connection: Connection, than: Session) -> Session:
    """The session that has taken the place of this one."""
    async with asyncio.timeout(WAIT_S):
        await than.disconnected.wait()
        return await connection.session()


async def answers(connection: Connection) -> bool:
    return bool((await connection.request("$SYS.REQ.USER.INFO", b"", timeout_s=30)).data)


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while text not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_clients_may_get_password_before_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file of the clients is new, the server knows the old password alone: sessions stay, also over a restart of
    the server. Then it knows the new one alone: they are back at once."""
    path, of_server = tmp_path / "password", tmp_path / "servers"
    path.write_text("old\n")
    of_server.write_text("old\n")
    server = EmbeddedServer(tmp_path / "nats", login=Login(user="u", password_file=of_server), dies_with_us=True)
    await server.start()
    try:
        connection = await connect(server.url, name="test", login=Login(user="u", password_file=path), timeout_s=10)
        session = await connection.session()
        path.write_text("new\n")
        await logged(caplog, "NATS refuses user u")
        assert not session.disconnected.is_set() and await answers(connection)
        await server.restart()
        session = await another(connection, session)
        assert await answers(connection)
        assert "the previous one is used" in caplog.text
        of_server.write_text("new\n")
        await server.renew()
        await another(connection, session)
        assert await answers(connection)
        await connection.close()
    finally:
        await server.kill()


async def test_server_may_get_password_first_where_clients_have_both(tmp_path: Path) -> None:
    path, of_server = tmp_path / "password", tmp_path / "servers"
    path.write_text("new\nold\n")
    of_server.write_text("old\n")
    server = EmbeddedServer(tmp_path / "nats", login=Login(user="u", password_file=of_server), dies_with_us=True)
    await server.start()
    try:
        connection = await connect(server.url, name="test", login=Login(user="u", password_file=path), timeout_s=10)
        session = await connection.session()
        of_server.write_text("new\nold\n")
        await server.renew()
        session = await another(connection, session)
        assert await answers(connection)
        await connection.close()
    finally:
        await server.kill()


async def test_session_moves_to_new_key(tmp_path: Path) -> None:
    """A file that is no key yet changes nothing."""
    path, key = tmp_path / "reader.key", make_key("coordinator")
    write_key(path, key)
    new = make_key("coordinator")
    async with served(tmp_path / "nats", None, [key]) as server:
        connection = await connect(server.url, name="test", login=Login(key=path), timeout_s=10)
        session = await connection.session()
        path.write_text("half of a")
        await asyncio.sleep(0.2)
        assert not session.disconnected.is_set() and await answers(connection)
        rewrite_key(path, new)
        await server.let_in([new.user])
        await another(connection, session)
        assert await answers(connection)
        await connection.close()


async def test_refusal_counts_only_while_server_says_so(tmp_path: Path) -> None:
    """Of a key that it let in before; a server that is away says nothing, and one that lets it in ends it."""
    path, key, other = tmp_path / "coordinator.key", make_key("coordinator"), make_key("reader")
    write_key(path, key)

    async def until(connection: Connection, *, is_denied: bool) -> None:
        async with asyncio.timeout(WAIT_S):
            while (connection.denied_since_s is not None) is not is_denied:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async with served(tmp_path / "nats", None, [other]) as server:
        connection = Connection([server.url], name="test", login=Login(key=path))
        with pytest.raises(LoginRefused):
            await connection.start(5.0)
        assert connection.denied_since_s is None, "it was never let in"
        await server.let_in([key.user, other.user])
        connection = await connect(server.url, name="test", login=Login(key=path), timeout_s=10)
        await server.let_in([other.user])
        await until(connection, is_denied=True)
        await server.stop()
        await until(connection, is_denied=False)
        await server.start()
        await until(connection, is_denied=True)
        await server.let_in([key.user, other.user])
        await until(connection, is_denied=False)
        assert await answers(connection)
        await connection.close()


async def test_same_content_moves_nothing(tmp_path: Path) -> None:
    path, key = tmp_path / "coordinator.key", make_key("coordinator")
    write_key(path, key)
    async with served(tmp_path / "nats", None, [key]) as server:
        connection = await connect(server.url, name="test", login=Login(key=path), timeout_s=10)
        session = await connection.session()
        rewrite_key(path, key)
        await asyncio.sleep(0.2)
        assert not session.disconnected.is_set()
        await connection.close()


async def test_key_of_another_login_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, key, other = tmp_path / "coordinator.key", make_key("coordinator"), make_key("reader")
    write_key(path, key)
    async with served(tmp_path / "nats", None, [key, other]) as server:
        connection = await connect(server.url, name="test", login=Login(key=path), timeout_s=10)
        session = await connection.session()
        rewrite_key(path, other)
        await logged(caplog, "is the key of another login now")
        assert not session.disconnected.is_set()
        await connection.close()


async def test_ca_of_clients_may_change_before_servers(tmp_path: Path) -> None:
    """A bundle of both, the server's certificate of the new one, then the new one alone: nothing is refused."""
    old, new = Certified(tmp_path / "old"), Certified(tmp_path / "new")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(old.ca.read_bytes())
    async with served(tmp_path / "nats", old.tls()) as server:
        connection = await connect(server.url, name="test", login=Login(tls_ca=bundle), timeout_s=10)
        session = await connection.session()
        bundle.write_bytes(old.ca.read_bytes() + new.ca.read_bytes())
        session = await another(connection, session)
        old.server.write_bytes(new.server.read_bytes())
        await server.renew()
        bundle.write_bytes(new.ca.read_bytes())
        await another(connection, session)
        assert await answers(connection)
        await connection.close()


async def test_move_hears_every_message(tmp_path: Path) -> None:
    """What is published while a session moves comes on the one or the other."""
    path, key = tmp_path / "password", [str(n) for n in range(400)]
    path.write_text("p\n")
    login = Login(user="u", password_file=path)
    server = EmbeddedServer(tmp_path / "nats", login=Login(user="u", password="p"), dies_with_us=True)
    await server.start()
    heard: set[str] = set()
    done = asyncio.Event()

    async def on_message(message: Msg) -> None:
        heard.add(message.data.decode())
        if len(heard) == len(key):
            done.set()

    try:
        connection = await connect(server.url, name="test", login=login, timeout_s=10)
        source = await connect(server.url, name="source", login=Login(user="u", password="p"), timeout_s=10)
        await connection.subscribe("numbers", on_message)
        assert await answers(connection)
        session = await connection.session()
        for number in key:
            if number == "100":
                path.write_text("p\nolder\n")
            await (await source.session()).publish("numbers", number.encode())
            await asyncio.sleep(0.001)
        async with asyncio.timeout(WAIT_S):
            await done.wait()
        assert session.disconnected.is_set()
        await connection.close()
        await source.close()
    finally:
        await server.kill()


async def test_last_address_is_tried_while_names_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup_ends = asyncio.Event()
    lookups: list[str] = []
    addresses = Addresses(["tls://head.example:4222"])
    assert await addresses.servers() == (["tls://head.example:4222"], "")
    addresses.note_connected("tls://head.example:4222", "10.0.0.7")

    async def silent(host: str, *_: Any, **__: Any) -> list[object]:
        lookups.append(host)
        await lookup_ends.wait()
        return [("10.0.0.8",)]

    async def unknown(*_: Any, **__: Any) -> list[object]:
        raise socket.gaierror(socket.EAI_AGAIN, "no name server")

    monkeypatch.setattr("unicrond.events.nats.addresses.LOOKUP_S", 0.05)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", silent, raising=False)
    for _ in range(3):
        assert await addresses.servers() == (["tls://10.0.0.7:4222"], "head.example")
    assert lookups == ["head.example"]
    lookup_ends.set()
    assert await addresses.servers() == (["tls://head.example:4222"], "")
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown, raising=False)
    assert await addresses.servers() == (["tls://10.0.0.7:4222"], "head.example")


async def test_connection_comes_back_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS still wants the server's name."""
    certified = Certified(tmp_path / "tls")
    async with served(tmp_path / "nats", certified.tls()) as server:
        url = f"nats://localhost:{server.port}"
        connection = await connect(url, name="test", login=Login(tls_ca=certified.ca), timeout_s=10)
        session = await connection.session()

        async def unknown(host: str, port: int, **_: Any) -> list[object]:
            if host == "localhost":
                raise socket.gaierror(socket.EAI_AGAIN, "no name server")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown, raising=False)
        await server.restart()
        await another(connection, session)
        assert await answers(connection)
        await connection.close()
