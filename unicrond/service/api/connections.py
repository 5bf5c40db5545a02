"""What strangers may hold open of the API: its connections are counted, and none waits without end for a request.

Rules
-----
* A connection is *busy* from the moment that a request's head is whole until its answer is made; else it *waits*. While
  the answer is written it waits as well, as who does not read might keep it for ever; but it is the last to be closed.
* One that waits with half a head, or has never sent a byte, is closed after `HEAD_S`. After an answer it may stay as
  long as aiohttp keeps it (75 s); a body may take `BODY_S` (http_parts.py).
* There are at most `connections_max`, fewer than the process may have descriptors: the log, the archive and children
  need some. For one more the oldest that waits goes, of the address with the most that wait: who floods pays. Where all
  are busy the new one is told so, and closed. (With TLS it is closed alone: nothing can be said before a handshake.)
* A connection counts from the moment that it is accepted, before its TLS handshake, which is part of the first head.

What does not live here: who may ask for what (access.py).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

from aiohttp import web

from unicrond.core.state.alarms import Alarm

log = logging.getLogger(__name__)

HEAD_S = 10.0
_CONNECTIONS_MAX = 1024
#: Of the process's file descriptors, those that are never a connection's.
_DESCRIPTORS_KEPT = 256
_SWEEP_S = 1.0
_SAY_AGAIN_S = 60.0
_BUSY_BODY = b'{"error": "api: all connections are busy; try again in a moment"}'
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BUSY_BODY), _BUSY_BODY)
)


def connections_max() -> int:
    """Return how many connections the process can afford; raises the soft limit of descriptors to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = _CONNECTIONS_MAX + _DESCRIPTORS_KEPT if hard == resource.RLIM_INFINITY else hard
    return max(16, min(_CONNECTIONS_MAX, limit - _DESCRIPTORS_KEPT))


class ApiConnections:
    """Counts the connections of one server and closes those that wait too long, or are too many."""

    def __init__(self, most: int, head_s: float = HEAD_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most, self._head_s, self._now_s = most, head_s, now_s
        self._by_protocol: dict[asyncio.BaseProtocol, _Connection] = {}
        #: Address -> its connections that wait, the oldest first.
        self._waiting: dict[str, dict[_Connection, None]] = {}
        #: How many were closed since there were too many, and since their request did not come.
        self.closed_for_room = 0
        self.closed_late = 0
        self._said_at_s = self._crowded_at_s = float("-inf")
        #: The address that had the most, when one was closed for room last.
        self._crowd = ""

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Mark the request's connection as busy while it is answered. Goes before every other middleware."""
        connection = self._by_protocol.get(request.protocol)
        if connection is not None:
            self._work(connection)
        try:
            response = await handler(request)
            if connection is not None and isinstance(response, web.Response):
                await self._write(connection, request, response)
            return response
        finally:
            if connection is not None and request.protocol in self._by_protocol:
                self._wait(connection)

    @asynccontextmanager
    async def listening(
        self, runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None
    ) -> AsyncIterator[asyncio.Server]:
        """Listen for the runner's application as long as the context lasts. Raises OSError."""
        loop = asyncio.get_running_loop()
        make = cast(Callable[[], asyncio.Protocol], runner.server)
        server = await loop.create_server(lambda: _Connection(self, make, context), host, port)
        sweeper = asyncio.create_task(self._sweep(), name="api-connections")
        try:
            yield server
        finally:
            sweeper.cancel()
            server.close()

    def alarms(self) -> list[Alarm]:
        """Return the alarm that connections were closed for room within the last minute."""
        if self._now_s() - self._crowded_at_s >= _SAY_AGAIN_S:
            return []
        text = f"the API has closed {self.closed_for_room} connections that sent no request, to have room for others"
        return [Alarm("api-crowded", f"{text}; most were of {self._crowd}")]

    def count(self) -> int:
        """Count the open connections."""
        return len(self._by_protocol)

    # --- what happens to them ----------------------------------------------------------------

    def admit(self, connection: _Connection) -> bool:
        """Take a new connection in, at another's cost if there are too many; return False if all are busy."""
        if len(self._by_protocol) >= self._most:
            oldest = self._oldest_of_most()
            if oldest is None:
                return False
            self.closed_for_room += 1
            self._crowded_at_s, self._crowd = self._now_s(), oldest.address
            self._say(f"more than {self._most} connections; those of {oldest.address} that send no request are closed")
            self._close(oldest)
        self._by_protocol[connection.inner] = connection
        self._wait(connection, has_answered=False)
        return True

    def forget(self, connection: _Connection) -> None:
        """Drop a connection that is closed."""
        self._by_protocol.pop(connection.inner, None)
        self._work(connection)

    def close_late(self) -> None:
        """Close those whose request does not come."""
        before_s = self._now_s() - self._head_s
        for connections in [list(waiting) for waiting in self._waiting.values()]:
            for connection in connections:
                if connection.owes_since_s is not None and connection.owes_since_s < before_s:
                    self.closed_late += 1
                    self._say(f"a request of {connection.address} did not come within {self._head_s:g} s")
                    self._close(connection)

    def owe(self, connection: _Connection) -> None:
        """Note that a part of a head has come, so that the rest is owed."""
        is_waiting = not connection.is_answering and connection in self._waiting.get(connection.address, ())
        if connection.owes_since_s is None and is_waiting:
            connection.owes_since_s = self._now_s()

    async def _write(self, connection: _Connection, request: web.Request, response: web.Response) -> None:
        """Write the answer, as aiohttp would after the middleware; there is nothing left for it then."""
        if request.protocol in self._by_protocol:
            self._wait(connection)
        connection.is_answering = True
        try:
            with suppress(ConnectionError):  # aiohttp meets it again, and ends the connection
                await response.prepare(request)
                await response.write_eof()
        finally:
            connection.is_answering = False

    def _wait(self, connection: _Connection, *, has_answered: bool = True) -> None:
        connection.owes_since_s = None if has_answered else self._now_s()
        self._waiting.setdefault(connection.address, {})[connection] = None

    def _work(self, connection: _Connection) -> None:
        waiting = self._waiting.get(connection.address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(connection.address, None)

    def _oldest_of_most(self) -> _Connection | None:
        crowd = max(self._waiting.values(), key=len, default=None)
        if not crowd:
            return None
        return next((connection for connection in crowd if not connection.is_answering), next(iter(crowd)))

    def _close(self, connection: _Connection) -> None:
        self.forget(connection)
        connection.abort()

    def _say(self, text: str) -> None:
        if self._now_s() - self._said_at_s >= _SAY_AGAIN_S:
            self._said_at_s = self._now_s()
            log.warning("API: %s", text)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.close_late()


class _Connection(asyncio.Protocol):
    """Passes a connection's calls on to aiohttp's protocol. `owes_since_s`: since when a head has been due;
    `is_answering`: its answer is being written."""

    def __init__(
        self, connections: ApiConnections, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None
    ) -> None:
        self._connections = connections
        self._context = context
        self.inner = make()
        self.address = "?"
        self.owes_since_s: float | None = None
        self.is_answering = False
        self._transport: asyncio.Transport | None = None
        self._is_admitted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection in, or refuse it. With TLS this is called again once the handshake is over."""
        is_accepted, self._transport = self._transport is None, cast(asyncio.Transport, transport)
        if not is_accepted:
            self.inner.connection_made(transport)
            return
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else "?"
        self._is_admitted = self._connections.admit(self)
        if not self._is_admitted:
            if self._context is None:
                self._transport.write(_BUSY)
            self._transport.close()
        elif self._context is None:
            self.inner.connection_made(transport)
        else:
            handshake = _Handshake(self, self._context)
            self._transport.set_protocol(handshake)
            handshake.connection_made(self._transport)

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on."""
        if self._is_admitted:
            self._connections.owe(self)
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass the end on."""
        return self.inner.eof_received() if self._is_admitted else None

    def connection_lost(self, error: Exception | None) -> None:
        """Drop the connection."""
        if self._is_admitted:
            self._connections.forget(self)
            self.inner.connection_lost(error)

    def pause_writing(self) -> None:
        """Pass it on."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self.inner.resume_writing()

    def forget(self) -> None:
        """Count the connection no more."""
        self._connections.forget(self)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()


class _Handshake(SSLProtocol):
    """asyncio's TLS, which tells nobody of a connection that is lost before its handshake is over: this one does."""

    def __init__(self, connection: _Connection, context: ssl.SSLContext) -> None:
        nobody = cast("asyncio.Future[None]", None)  # waits for the handshake
        super().__init__(asyncio.get_running_loop(), connection, context, nobody, server_side=True)
        self._connection = connection

    def connection_lost(self, error: BaseException | None) -> None:
        """Count the connection no more."""
        super().connection_lost(error)
        self._connection.forget()
