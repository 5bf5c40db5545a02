"""The lease of the heads in the simulation: the log's server holds it, and a process reaches it over one link.

It is in the server's memory: a crash forgets it (`MemoryLease.forget`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.log.lease import Holder, LeaseEntry, LeaseView, MemoryLease
from unicrond.events.wire.codec import COORDINATOR
from unicrond.replay.simulation.cluster.log_client import Beats
from unicrond.replay.simulation.cluster.log_server import LogServer
from unicrond.replay.simulation.models.network import Link

#: As events/nats/lease.py has it.
ANSWER_S = 0.5
T = TypeVar("T")


class LeaseEnd:
    """A Lease over one link."""

    def __init__(self, lease: MemoryLease, server: LogServer, beats: Beats, link: Link) -> None:
        self._lease = lease
        self._server = server
        self._beats = beats
        self._link = link
        self._life = server.life

    async def look(self) -> LeaseView:
        """Return the entry, and whether the server has crashed since the last look; see Lease."""
        life, self._life = self._life, self._server.life
        return LeaseView(await self._ask(lambda: self._lease.present), life != self._life)

    async def acquire_or_renew(self, holder: Holder, after: int) -> LeaseEntry | None:
        """Acquire or renew the lease; see Lease."""
        return await self._ask(lambda: self._lease.acquire_or_renew_now(holder, after))

    async def announce(self, holder: Holder) -> None:
        """Announce a head; see Lease."""
        await self._ask(lambda: self._lease.announce_now(holder))

    async def heads(self) -> list[Holder]:
        """Return the announced heads; see Lease."""
        return await self._ask(lambda: self._lease.present_heads)

    async def listen(self, on_news: Callable[[], object], on_beat: Callable[[int], object]) -> None:
        """Call back on news and on the coordinator's beats; see Lease."""
        self._lease.on_news.append(lambda: self._link.send(on_news))
        self._beats.listen_to(COORDINATOR, self._link, on_beat)

    async def _ask(self, request: Callable[[], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def take(answer: T) -> None:
            """Set the answer, unless one came before."""
            if not future.done():
                future.set_result(answer)

        def arrive() -> None:
            """Answer the request, if the server is up."""
            if self._server.up:
                answer = request()
                self._link.send(lambda: take(answer))

        self._link.send(arrive)
        ready, _ = await asyncio.wait([future], timeout=ANSWER_S)
        if not ready:
            raise LogUnavailable("the heads' lease: no answer")
        return future.result()
