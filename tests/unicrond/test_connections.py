"""Connections of the API: who waits with half a request goes; who asks is answered, however many wait."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
from aiohttp import web

from tests.events.certified import Certified
from unicrond.intake.tls import Files
from unicrond.service.api.connections import ApiConnections, connections_max
from unicrond.service.trust.certificates import Certificates

#: More than the buffers of a socket take.
LARGE = 20_000_000
HALF = b"GET /v1/state HTTP/1.1\r\nHost: 127.0.0.1\r\n"


class Site(NamedTuple):
    connections: ApiConnections
    port: int
    entered: asyncio.Semaphore
    release: asyncio.Event


@asynccontextmanager
async def site(most: int = 16, head_s: float = 30.0, context: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    """An application whose /slow says that it has begun, and answers when it is released."""
    entered, release = asyncio.Semaphore(0), asyncio.Event()

    async def fast(_: web.Request) -> web.Response:
        return web.Response(text="fast")

    async def slow(_: web.Request) -> web.Response:
        entered.release()
        await release.wait()
        return web.Response(text="slow")

    async def large(_: web.Request) -> web.Response:
        return web.Response(body=bytes(LARGE))

    connections = ApiConnections(most, head_s)
    app = web.Application(middlewares=[connections.middleware])
    app.add_routes([web.get("/", fast), web.get("/slow", slow), web.get("/large", large)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        async with connections.listening(runner, "127.0.0.1", 0, context) as server:
            yield Site(connections, server.sockets[0].getsockname()[1], entered, release)
    finally:
        await runner.cleanup()


async def ask(port: int, path: str = "/", trusted: ssl.SSLContext | None = None) -> tuple[int, str]:
    url = f"{'https' if trusted else 'http'}://127.0.0.1:{port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url, ssl=trusted or True) as response:
        return response.status, await response.text()


async def until_none(api: Site) -> None:
    for _ in range(250):
        if not api.connections.count():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{api.connections.count()} connections count")


async def half(port: int, stack: AsyncExitStack, data: bytes = HALF) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    writer.write(data)
    await writer.drain()
    return reader


async def test_api_answers_beside_more_half_requests_than_connections() -> None:
    async with site(most=8) as api, AsyncExitStack() as stack:
        readers = [await half(api.port, stack) for _ in range(40)]
        assert await ask(api.port) == (200, "fast")
        assert await asyncio.wait_for(readers[0].read(), 30) == b"", "the oldest is closed"
        assert api.connections.closed_for_room >= 32
        assert [alarm.key for alarm in api.connections.alarms()] == ["api-crowded"]
        assert api.connections.count() <= 8


@pytest.mark.parametrize("data", [b"", HALF], ids=["silent", "half"])
async def test_connection_without_request_is_closed_in_time(data: bytes) -> None:
    async with site(head_s=0.2) as api, AsyncExitStack() as stack:
        reader = await half(api.port, stack, data)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        assert api.connections.closed_late == 1


async def test_connection_with_answer_may_ask_again() -> None:
    async with site(head_s=0.2) as api, aiohttp.ClientSession() as session:
        for _ in range(2):
            async with session.get(f"http://127.0.0.1:{api.port}/") as response:
                assert await response.text() == "fast"
            api.connections.close_late()
            assert api.connections.count() == 1


async def test_request_in_work_is_never_closed_for_room() -> None:
    async with site(most=2, head_s=0.2) as api, AsyncExitStack() as stack:
        slow = [asyncio.create_task(ask(api.port, "/slow")) for _ in range(2)]
        await api.entered.acquire()
        await api.entered.acquire()
        refused = await half(api.port, stack)
        answer = await asyncio.wait_for(refused.read(), 30)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"all connections are busy" in answer
        api.connections.close_late()
        api.release.set()
        assert await asyncio.gather(*slow) == [(200, "slow")] * 2


async def test_handshakes_that_do_not_end_count(tmp_path: Path) -> None:
    certified = Certified(tmp_path)
    context = Certificates(Files(certified.ca, certified.server, certified.server), None, is_for_api=True).context
    trusted = ssl.create_default_context(cafile=str(certified.ca))
    async with site(most=8, head_s=1.0, context=context) as api, AsyncExitStack() as stack:
        readers = [await half(api.port, stack, data) for data in (b"", b"\x16\x03\x01") for _ in range(10)]
        assert await ask(api.port, trusted=trusted) == (200, "fast")
        assert await asyncio.wait_for(readers[0].read(), 30) == b"", "the oldest is closed"
        assert 8 >= api.connections.count() > 0
        assert await asyncio.wait_for(readers[-1].read(), 10) == b"", "a handshake does not come within head_s"


async def test_refused_handshake_is_closed_and_a_client_that_goes_counts_no_more(tmp_path: Path) -> None:
    certified = Certified(tmp_path)
    context = Certificates(Files(certified.ca, certified.server, certified.server), None, is_for_api=True).context
    trusted = ssl.create_default_context(cafile=str(certified.ca))
    async with site(most=1, context=context) as api, AsyncExitStack() as stack:
        slow = asyncio.create_task(ask(api.port, "/slow", trusted))
        await api.entered.acquire()
        refused = await half(api.port, stack)
        assert await asyncio.wait_for(refused.read(), 30) == b""
        api.release.set()
        assert await slow == (200, "slow")
        await half(api.port, stack, HALF)  # no handshake at all: asyncio ends it
        await until_none(api)


async def test_answer_that_is_written_is_the_last_to_go() -> None:
    async with site(most=4) as api, AsyncExitStack() as stack:
        reader = await half(api.port, stack, b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert b"Content-Length: %d" % LARGE in head
        for _ in range(12):
            await half(api.port, stack)
        assert await asyncio.wait_for(reader.readexactly(LARGE), 10) == bytes(LARGE)
        assert api.connections.closed_for_room


async def test_who_reads_no_answer_goes_where_there_is_nobody_else() -> None:
    async with site(most=4) as api, AsyncExitStack() as stack:
        for _ in range(4):
            await half(api.port, stack, b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert await ask(api.port) == (200, "fast")


async def test_address_with_most_that_wait_pays() -> None:
    async with site(most=4) as api, AsyncExitStack() as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port, local_addr=("127.0.0.2", 0))
        stack.callback(writer.close)
        for _ in range(12):
            await half(api.port, stack)
        writer.write(HALF + b"Connection: close\r\n\r\n")
        await writer.drain()
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 404 ")


def test_process_keeps_descriptors_for_its_log() -> None:
    assert 16 <= connections_max() <= 1024
