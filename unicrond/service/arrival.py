"""From the start of a head's process to a log that answers.

Rules
-----
* A NATS that is away is waited for, without end: to end and be started again would only make the waits longer. A login
  that NATS refuses ends the process.
* A signal ends the waiting at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from events.log import LogUnavailable
from events.nats_connection import Connection, Login, Refused, connect
from events.nats_url import parse_urls

log = logging.getLogger("unicrond")

T = TypeVar("T")
#: How long one attempt to connect lasts.
CONNECT_TIMEOUT_S = 15.0
_SAY_AFTER_S = 2.0


class Stopped(Exception):
    """A signal came before the head had begun."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by.name)
        self.by = by


class Waiting:
    """What a head that has not begun waits for."""

    def __init__(self) -> None:
        self.text = "starts"

    def say(self, text: str) -> None:
        """Something else from now on. Logged once."""
        if text != self.text:
            self.text = text
            log.warning("not begun yet: %s", text)


async def unless_stopped(stop: asyncio.Queue[signal.Signals], work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises Stopped where a signal comes first."""
    working = asyncio.create_task(work, name="start")
    stopped = asyncio.create_task(stop.get(), name="stop")
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        log.info("stopping on %s", stopped.result().name)
        raise Stopped(stopped.result())
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)


async def reach(url: str, login: Login, name: str, waiting: Waiting) -> Connection:
    """A connection to NATS, however long that takes. Raises Refused."""
    timeout_s = _SAY_AFTER_S
    while True:
        try:
            return await connect(parse_urls(url), name=name, login=login, timeout_s=timeout_s)
        except Refused:
            if timeout_s == CONNECT_TIMEOUT_S:
                raise
        except LogUnavailable as error:
            waiting.say(f"no NATS at {url}: {error}")
        timeout_s = CONNECT_TIMEOUT_S
