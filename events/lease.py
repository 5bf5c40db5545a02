"""The heads' lease: which head leads, said by a key that ends by itself unless its holder renews it.

Rules
-----
* The lease saves fights between heads. It makes nothing safe: that is the fence of a term (log.py), and a head that
  decides without the lease harms nothing.
* One lease, compared and set: `put` takes or renews it where its revision is still the one that was seen (0: free). Of
  several that try at once one gets it.
* The log's own server ends it, LEASE_S after the last renewal, by its own clock: no two machines' clocks are compared.
* The key is kept in memory, not on disk: a server that restarts forgets it, and so does a cluster that restarts whole.
  What a free lease means after that is for `unicrond/core/leadership.py` to say.
* A head that leaves of its own will says so in the lease, and a head that stands by need not wait for its end.
* Heads that stand by announce themselves beside it, so that the one that leads, and people, know of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

#: How long the lease lasts after a renewal, whole seconds.
LEASE_S = 2
RENEW_S = 0.5
#: How long a head that announced itself is known.
ANNOUNCED_S = 6


class Holder(msgspec.Struct, frozen=True, omit_defaults=True):
    """A head's process.

    `head`: a name that no other life of a process has; `process`: HOST:PID, for people; `api`: where its API listens,
    HOST:PORT. `machine`, `pid`, `began`: what tells another process of the same machine whether this one still runs
    (unicrond/service/same_machine.py). `has_left`: it has ended of its own will.
    """

    head: str
    process: str = ""
    api: str = ""
    machine: str = ""
    pid: int = 0
    began: int = 0
    has_left: bool = False


class Held(NamedTuple):
    """The lease as it stands. `holder` None: something that no head wrote stands there, and does not count."""

    revision: int
    holder: Holder | None


class Look(NamedTuple):
    """What the server says of the lease. `held` None: it is free. `is_anew`: over another connection than the last."""

    held: Held | None
    is_anew: bool = False


class Lease(Protocol):
    """One process's access to the lease. All but `listen` raise LogUnavailable where no answer comes in time."""

    async def look(self) -> Look:
        """Who holds it."""
        ...

    async def put(self, holder: Holder, after: int) -> Held | None:
        """Hold it for LEASE_S from now, if its revision is still `after` (0: it is free); None: it is not."""
        ...

    async def announce(self, holder: Holder) -> None:
        """Say that this head runs; known for ANNOUNCED_S."""
        ...

    async def heads(self) -> list[Holder]:
        """Those that have announced themselves."""
        ...

    async def listen(self, on_news: Callable[[], object], on_beat: Callable[[int], object]) -> None:
        """From now on: `on_news()` when a head has written the lease, `on_beat(term)` with each beat of a
        coordinator. A hint: what is said during an outage is not told again."""
        ...


class MemoryLease:
    """The lease in memory, and a Lease for each process that asks: for tests and for simulation.

    `now_s`: the clock of the server that keeps it."""

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        self._now_s = now_s or asyncio.get_running_loop().time
        self._revision = 0
        self._held: Held | None = None
        self._ends_s = 0.0
        self._announced: dict[str, tuple[Holder, float]] = {}
        self.on_news: list[Callable[[], object]] = []
        self._on_beat: list[Callable[[int], object]] = []

    def forget(self) -> None:
        """As a server that restarts."""
        self._held, self._revision = None, 0
        self._announced.clear()

    def beat(self, term: int) -> None:
        """A coordinator of this term has sent a beat."""
        for tell in self._on_beat:
            tell(term)

    async def look(self) -> Look:
        """See Lease."""
        return Look(self.present)

    @property
    def present(self) -> Held | None:
        """Who holds it now."""
        return self._held if self._now_s() < self._ends_s else None

    async def put(self, holder: Holder, after: int) -> Held | None:
        """See Lease."""
        return self.put_now(holder, after)

    def put_now(self, holder: Holder, after: int) -> Held | None:
        """`put`."""
        present = self.present
        if (present.revision if present else 0) != after:
            return None
        self._revision += 1
        self._held, self._ends_s = Held(self._revision, holder), self._now_s() + LEASE_S
        for tell in self.on_news:
            tell()
        return self._held

    async def announce(self, holder: Holder) -> None:
        """See Lease."""
        self.announce_now(holder)

    def announce_now(self, holder: Holder) -> None:
        """`announce`."""
        self._announced[holder.head] = holder, self._now_s() + ANNOUNCED_S

    async def heads(self) -> list[Holder]:
        """See Lease."""
        return self.present_heads

    @property
    def present_heads(self) -> list[Holder]:
        """Those that have announced themselves."""
        return [holder for holder, ends_s in self._announced.values() if self._now_s() < ends_s]

    async def listen(self, on_news: Callable[[], object], on_beat: Callable[[int], object]) -> None:
        """See Lease."""
        self.on_news.append(on_news)
        self._on_beat.append(on_beat)
