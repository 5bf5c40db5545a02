"""The lease of the heads in the simulation: the log's server holds it, and a process reaches it over one link.

It is in the server's memory: a crash forgets it (`MemoryLease.forget`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.log.lease import ANNOUNCED_S, LEASE_S, Holder, LeaseEntry, LeaseView
from unicrond.events.wire.codec import COORDINATOR
from unicrond.replay.simulation.cluster.log_client import Beats
from unicrond.replay.simulation.cluster.log_server import LogServer
from unicrond.replay.simulation.models.network import Link

#: As events/nats/lease.py has it.
ANSWER_S = 0.5
T = TypeVar("T")


class MemoryLease:
    """The lease in memory, and a Lease for each process that asks: for tests and for simulation.

    `now_s`: the clock of the server that keeps it.
    """

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        self._now_s = now_s or asyncio.get_running_loop().time
        self._revision = 0
        self._entry: LeaseEntry | None = None
        self._ends_s = 0.0
        self._announced: dict[str, tuple[Holder, float]] = {}
        self.on_news: list[Callable[[], object]] = []
        self._on_beat: list[Callable[[int], object]] = []

    def forget(self) -> None:
        """Remove everything, as a server that restarts does."""
        self._entry, self._revision = None, 0
        self._announced.clear()

    def beat(self, term: int) -> None:
        """Notify the listeners that a coordinator of this term has sent a beat."""
        for tell in self._on_beat:
            tell(term)

    async def look(self) -> LeaseView:
        """Return the present holder (Lease.look)."""
        return LeaseView(self.present)

    @property
    def present(self) -> LeaseEntry | None:
        """Return the lease as it is now; None: it is free."""
        return self._entry if self._now_s() < self._ends_s else None

    async def acquire_or_renew(self, holder: Holder, after: int) -> LeaseEntry | None:
        """Acquire or renew the lease (Lease.acquire_or_renew)."""
        return self.acquire_or_renew_now(holder, after)

    def acquire_or_renew_now(self, holder: Holder, after: int) -> LeaseEntry | None:
        """Acquire or renew the lease, for callers that cannot await."""
        present = self.present
        if (present.revision if present else 0) != after:
            return None
        self._revision += 1
        self._entry, self._ends_s = LeaseEntry(self._revision, holder), self._now_s() + LEASE_S
        for tell in self.on_news:
            tell()
        return self._entry

    async def announce(self, holder: Holder) -> None:
        """Announce a head (Lease.announce)."""
        self.announce_now(holder)

    def announce_now(self, holder: Holder) -> None:
        """Announce a head, for callers that cannot await."""
        self._announced[holder.head] = holder, self._now_s() + ANNOUNCED_S

    async def heads(self) -> list[Holder]:
        """Return the announced heads (Lease.heads)."""
        return self.present_heads

    @property
    def present_heads(self) -> list[Holder]:
        """Return the heads that have announced themselves."""
        return [holder for holder, ends_s in self._announced.values() if self._now_s() < ends_s]

    async def listen(self, on_news: Callable[[], object], on_beat: Callable[[int], object]) -> None:
        """Register the callbacks (Lease.listen)."""
        self.on_news.append(on_news)
        self._on_beat.append(on_beat)


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
        self._lease.on_news.append(lambda: self._link.send(on_news, back=True))
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
                self._link.send(lambda: take(answer), back=True)

        self._link.send(arrive)
        ready, _ = await asyncio.wait([future], timeout=ANSWER_S)
        if not ready:
            raise LogUnavailable("the heads' lease: no answer")
        return future.result()
