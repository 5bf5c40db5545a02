"""The embedded server: started, adopted, outliving its starter, refused where it would be unsafe."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import uvloop

from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.nats import server as module
from unicrond.events.nats.connection import Login, LoginRefused, connect
from unicrond.events.nats.server import EmbeddedServer, ServerError
from unicrond.events.trust.keys import load_or_create_key


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path / "nats")
    yield made
    await made.kill()


async def test_server_starts_stops_and_restarts(server: EmbeddedServer) -> None:
    assert await server.start() is False
    pid, port = server.pid, server.port
    assert pid is not None
    assert port > 0
    assert server.is_running()
    assert os.getsid(pid) == pid, "a session of its own"
    await server.restart()
    assert server.port == port
    assert server.pid != pid
    await server.stop()
    assert not server.is_running()
    await server.stop()  # nothing to do, nothing to complain about


async def test_server_is_adopted(server: EmbeddedServer) -> None:
    await server.start()
    other = EmbeddedServer(server.directory)
    assert await other.start() is True
    assert (other.pid, other.port) == (server.pid, server.port)
    third = EmbeddedServer(server.directory)
    await third.stop()
    assert not server.is_running()


async def test_slow_server_is_awaited_and_reported(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await server.start()
    assert server.pid is not None
    monkeypatch.setattr(module, "READY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(module, "_TELL_EVERY_S", 0.2)
    os.kill(server.pid, signal.SIGSTOP)
    while psutil.Process(server.pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110  # no event tells it
        await asyncio.sleep(0.01)
    try:
        with pytest.raises(ServerError, match=r"not ready after 0\.5 s; the end of .*nats-server\.log"):
            await EmbeddedServer(server.directory).adopt()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert caplog.text.count("nats-server is not ready yet") == 1
    assert await EmbeddedServer(server.directory).adopt()


async def test_server_outlives_its_starter(server: EmbeddedServer) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path; from unicrond.events.nats.server import EmbeddedServer;"
        "asyncio.run(EmbeddedServer(Path(sys.argv[1])).start())"
    )
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script, str(server.directory)], check=True)
    assert await server.adopt() is True
    assert server.is_running()
    pid = server.pid
    assert pid is not None
    await server.stop()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_server_ignores_stale_pid(server: EmbeddedServer) -> None:
    server.directory.mkdir()
    (server.directory / "nats-server.pid").write_text(str(os.getpid()))
    assert await server.adopt() is False
    assert await server.start() is False
    await server.kill()
    (server.directory / "nats-server.pid").write_text("nonsense")
    assert await server.start() is False


async def test_server_reports_its_end(server: EmbeddedServer) -> None:
    await server.start()
    ending = asyncio.create_task(server.ended())
    await asyncio.sleep(0)
    assert not ending.done()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await asyncio.wait_for(ending, 10)
    assert not server.is_running()


def test_server_runs_under_uvloop(tmp_path: Path) -> None:
    async def start_and_kill() -> None:
        server = EmbeddedServer(tmp_path)
        await server.start()
        await server.kill()
        assert not server.is_running()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(start_and_kill())


async def test_server_explains_occupied_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = EmbeddedServer(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(ServerError, match="address already in use"):
            await server.start()
    assert not server.is_running()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "head-node.example"])
def test_server_needs_credentials_on_public_address(tmp_path: Path, host: str) -> None:
    for login in (None, Login(), Login(user="u")):
        with pytest.raises(ValueError, match=f"host: {host} is not loopback"):
            EmbeddedServer(tmp_path, host=host, login=login)
    EmbeddedServer(tmp_path, host=host, login=Login(user="u", password="p"))


def test_server_refuses_bad_port(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="port: expected 0 to 65535, got 65536"):
        EmbeddedServer(tmp_path, port=65536)


async def test_server_config_is_private(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, login=Login(user="u", password="p"))
    await server.start()
    await server.kill()
    assert (tmp_path / "nats-server.conf").stat().st_mode & 0o077 == 0


async def test_refused_connection_ends_on_cancel(tmp_path: Path) -> None:
    """At whatever moment: nats-py swallows a cancellation while it closes a socket."""
    server = EmbeddedServer(tmp_path / "nats", users=[load_or_create_key(tmp_path, "operator").user])
    await server.start()
    try:
        async with asyncio.timeout(60):
            for number in range(30):
                with pytest.raises(LogUnavailable):  # a busy machine may not have refused it yet
                    await connect(server.url, name="nobody", timeout_s=0.05 + 0.003 * number)
            with pytest.raises(LoginRefused, match="NATS wants a login and got none"):
                await connect(server.url, name="nobody", timeout_s=5)
    finally:
        await server.kill()


async def test_running_server_takes_new_users_from_a_version_with_other_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-server takes them at its start alone, and refuses a reload that changes them: no next head began."""
    users = [load_or_create_key(tmp_path, login).user for login in ("coordinator", "operator")]
    directory = tmp_path / "nats"
    monkeypatch.setattr(module, "BUFFERED_BYTES", 4 << 20)
    older = EmbeddedServer(directory, users=users[:1], dies_with_us=True)
    await older.start()
    monkeypatch.undo()
    newer = EmbeddedServer(directory, users=users, dies_with_us=True)
    size = f"max_buffered_size: {module.BUFFERED_BYTES} "
    try:
        assert await newer.start(), "it is adopted"
        login = Login(key=tmp_path / "operator.key")
        await (await connect(newer.url, name="operator", login=login, timeout_s=10)).close()
        assert size not in (directory / "nats-server.conf").read_text()
        await newer.restart()
        assert size in (directory / "nats-server.conf").read_text()
    finally:
        await newer.kill()


async def test_adopter_finds_address_of_server(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, host="127.0.0.7")
    await server.start()
    try:
        beside = EmbeddedServer.beside(tmp_path)
        async with asyncio.timeout(10):
            assert await beside.adopt()
        assert beside.url == server.url and "127.0.0.7" in beside.url
    finally:
        await server.stop()
    assert not await EmbeddedServer.beside(tmp_path / "nothing").adopt()
