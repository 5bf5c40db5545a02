"""The heads' lease as a process reaches it in the simulation: kept by the log's server, over one link.

It is kept in the server's memory: a crash forgets it (`MemoryLease.forget`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from events.codec import COORDINATOR
from events.lease import Holder, LeaseEntry, LeaseView, MemoryLease
from events.log import LogUnavailable
from replay.simulation.log_client import Beats
from replay.simulation.log_server import LogServer
from replay.simulation.network import Link

#: As events/nats_lease.py has it.
ANSWER_S = 0.5
T = TypeVar("T")


class LeaseEnd:
    """A Lease over one link."""

    def __init__(self, kept: MemoryLease, server: LogServer, beats: Beats, link: Link) -> None:
        self._kept = kept
        self._server = server
        self._beats = beats
        self._link = link
        self._life = server.life

    async def look(self) -> LeaseView:
        """See Lease."""
        life, self._life = self._life, self._server.life
        return LeaseView(await self._ask(lambda: self._kept.present), life != self._life)

    async def acquire_or_renew(self, holder: Holder, after: int) -> LeaseEntry | None:
        """See Lease."""
        return await self._ask(lambda: self._kept.acquire_or_renew_now(holder, after))

    async def announce(self, holder: Holder) -> None:
        """See Lease."""
        await self._ask(lambda: self._kept.announce_now(holder))

    async def heads(self) -> list[Holder]:
        """See Lease."""
        return await self._ask(lambda: self._kept.present_heads)

    async def listen(self, on_news: Callable[[], object], on_beat: Callable[[int], object]) -> None:
        """See Lease."""
        self._kept.on_news.append(lambda: self._link.send(on_news))
        self._beats.listen_to(COORDINATOR, self._link, on_beat)

    async def _ask(self, request: Callable[[], T]) -> T:
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def take(answer: T) -> None:
            if not answered.done():
                answered.set_result(answer)

        def arrive() -> None:
            if self._server.up:
                answer = request()
                self._link.send(lambda: take(answer))

        self._link.send(arrive)
        done, _ = await asyncio.wait([answered], timeout=ANSWER_S)
        if not done:
            raise LogUnavailable("the heads' lease: no answer")
        return answered.result()
