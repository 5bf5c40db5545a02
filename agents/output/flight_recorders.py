"""Asks this node's workers what their flight recorders hold, for `unicronctl stacks`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from unicrond.agents.protocol.messages import Flight, Hello, TellFlight
from unicrond.events.vocabulary import WorkerId

TIMEOUT_S = 3.0


class Flights:
    """Asks workers for their flights. `send` puts the question to a worker; the shell calls `connected`, `disconnected`
    and `receive`."""

    def __init__(self, send: Callable[[WorkerId, TellFlight], None]) -> None:
        self._send = send
        self._able: set[WorkerId] = set()
        self._waiting: dict[WorkerId, asyncio.Future[Flight]] = {}

    def connected(self, hello: Hello) -> None:
        """Note that a worker is connected; an older one does not understand the question."""
        (self._able.add if hello.has_flight else self._able.discard)(hello.worker)

    def disconnected(self, worker: WorkerId) -> None:
        """Note that the worker is no longer connected."""
        self._able.discard(worker)

    def receive(self, worker: WorkerId, flight: Flight) -> None:
        """Pass the worker's answer on; one that comes too late is dropped."""
        waiting = self._waiting.get(worker)
        if waiting is not None and not waiting.done():
            waiting.set_result(flight)

    async def ask(self, worker: WorkerId) -> Flight:
        """Return the content of the worker's flight recorder, or why there is none."""
        if worker not in self._able:
            return Flight(trouble=f"worker {worker} does not run here, or is too old to tell")
        waiting = self._waiting.setdefault(worker, asyncio.get_running_loop().create_future())
        self._send(worker, TellFlight())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.shield(waiting)
        except TimeoutError:
            return Flight(trouble=f"no answer within {TIMEOUT_S:g} s: all threads of the worker stand still")
        finally:
            if self._waiting.get(worker) is waiting:  # not that of a later question
                del self._waiting[worker]
