"""Answers on the API's port before the API starts: a head that waits for its log says what it waits for.

Rules
-----
* `/livez` is 200: a head that waits is not helped by being killed. `/readyz` is 503. All else is 503 with the reason,
  `/healthz` aside, which is 200 in every state.
* The API takes the port over. A request between the two is refused, as in any restart.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from unicrond.service.api.http_parts import answer, error

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

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=context).start()
        yield
    finally:
        await runner.cleanup()
