"""The startup of a head's process, until the log answers.

Rules
-----
* The head waits for a NATS that is away, without end: to exit and be started again would only make the waits longer. A
  login that NATS refuses ends the process.
* A signal ends the waiting at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.nats.connection import Connection, Login, LoginRefused, connect
from unicrond.events.nats.url import parse_urls
from unicrond.service.api.connections import ApiConnections, connections_max
from unicrond.service.api.http_parts import answer, error

log = logging.getLogger("unicrond")

T = TypeVar("T")
#: How long one attempt to connect lasts.
CONNECT_TIMEOUT_S = 15.0
_SAY_AFTER_S = 2.0


class StoppedBySignal(Exception):
    """A signal came before the head had begun; `by`: which."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by.name)
        self.by = by


class StartupStatus:
    """What a head that has not begun is waiting for, as `text`."""

    def __init__(self) -> None:
        self.text = "starts"

    def say(self, text: str) -> None:
        """Set the text; log it if it is new."""
        if text != self.text:
            self.text = text
            log.warning("not begun yet: %s", text)


async def unless_stopped(stop: asyncio.Queue[signal.Signals], work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns. Raises StoppedBySignal where a signal comes first."""
    work_task = asyncio.create_task(work, name="start")
    stop_task = asyncio.create_task(stop.get(), name="stop")
    try:
        await asyncio.wait({work_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return await work_task
        log.info("stopping on %s", stop_task.result().name)
        raise StoppedBySignal(stop_task.result())
    finally:
        for task in (work_task, stop_task):
            task.cancel()
        await asyncio.gather(work_task, stop_task, return_exceptions=True)


async def reach(url: str, login: Login, name: str, status: StartupStatus) -> Connection:
    """Connect to NATS, however long that takes, and return the connection. Raises Refused."""
    timeout_s = _SAY_AFTER_S
    while True:
        try:
            return await connect(parse_urls(url), name=name, login=login, timeout_s=timeout_s)
        except LoginRefused:
            if timeout_s == CONNECT_TIMEOUT_S:
                raise
        except LogUnavailable as error:
            status.say(f"no NATS at {url}: {error}")
        timeout_s = CONNECT_TIMEOUT_S


STATUS = "starting"


@asynccontextmanager
async def porch(
    host: str, port: int, context: ssl.SSLContext | None, waits_for: Callable[[], str]
) -> AsyncIterator[None]:
    """Answer on the port as long as the context lasts. `waits_for`: in one line. Raises OSError."""

    async def handle(request: web.Request) -> web.Response:
        """Answer any request with what the head waits for."""
        body = {"status": STATUS, "trouble": waits_for(), "alarms": [], "leads": False}
        if request.path in ("/livez", "/healthz"):
            return answer(body)
        return answer(body, 503) if request.path == "/readyz" else error(503, f"coordinator: {waits_for()}")

    connections = ApiConnections(connections_max())
    app = web.Application(middlewares=[connections.middleware])
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        async with connections.listening(runner, host, port, context):
            yield
    finally:
        await runner.cleanup()
