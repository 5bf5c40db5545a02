"""A TCP proxy whose link can be cut as a network is: nothing arrives any more, and nobody is told so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PIECE_BYTES = 65536


class Proxy:
    """Made by `proxy_to`. While the link is cut it still accepts connections, which stay silent."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._whole = asyncio.Event()
        self._whole.set()
        self._back = asyncio.Event()
        self._back.set()
        self._out = asyncio.Event()
        self._out.set()
        self._serving: set[asyncio.Task[None]] = set()
        self.port = 0

    def cut(self) -> None:
        """From now on nothing passes, in either direction."""
        self._whole.clear()

    def cut_back(self) -> None:
        """From now on nothing comes back from the target; what is sent to it arrives."""
        self._back.clear()

    def cut_out(self) -> None:
        """From now on nothing reaches the target; what it sends arrives."""
        self._out.clear()

    def mend(self) -> None:
        """What has been sent meanwhile arrives, and the rest passes again."""
        for event in (self._whole, self._back, self._out):
            event.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._whole.wait()
            there = await asyncio.open_connection(*self._target)
            with contextlib.closing(there[1]):
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass_on(reader, there[1], self._out))
                    both.create_task(self._pass_on(there[0], writer, self._back))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # the other end is gone, or the proxy is to end
        finally:
            writer.close()
            self._serving.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event) -> None:
        with contextlib.closing(writer):
            while piece := await reader.read(_PIECE_BYTES):
                await self._whole.wait()
                await passes.wait()
                writer.write(piece)
                await writer.drain()

    async def end(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


@asynccontextmanager
async def proxy_to(host: str, port: int) -> AsyncIterator[Proxy]:
    """A proxy on a free port of loopback."""
    proxy = Proxy(host, port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()
