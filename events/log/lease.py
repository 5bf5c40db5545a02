"""The heads' lease: a key that names the head that leads, and expires unless its holder renews it.

Rules
-----
* The lease avoids contention between heads. Safety does not depend on it but on the fence of a term (event_log.py): a
  head that decides without the lease does no harm.
* One lease, compared and set: `acquire_or_renew` succeeds where its revision is still the one that was read (0: free).
  Of several processes that try at once one gets it.
* The log's own server expires it LEASE_S after the last renewal, by its own clock: no clocks are compared.
* The key is kept in memory, not on disk: a server that restarts forgets it, and so does a cluster that restarts whole.
  `unicrond/core/nodes/leadership.py` decides what a free lease means after that.
* A head that leaves of its own will writes that into the lease, so that a standby need not wait for its expiry.
* Standby heads announce themselves beside it, so that the leader, and people, know of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

#: How long the lease lasts after a renewal, whole seconds.
LEASE_S = 2
RENEW_S = 0.5
#: A coordinator to which so many of its own beats have not come back, those of one heartbeat, hears nothing: it cannot
#: renew, and its beats do not keep others from the lease.
DEAF_BEATS = 4
#: How long a head that announced itself is known.
ANNOUNCED_S = 6


class Holder(msgspec.Struct, frozen=True, omit_defaults=True):
    """A head's process.

    `head`: a name that no other process ever has; `process`: HOST:PID, for people; `api`: where its API listens,
    HOST:PORT. `machine`, `pid`, `began`: these tell another process of the same machine whether this one still runs
    (unicrond/service/coordinator/other_processes.py). `has_left`: it has ended of its own will.
    """

    head: str
    process: str = ""
    api: str = ""
    machine: str = ""
    pid: int = 0
    start_ticks: int = 0
    has_left: bool = False


class LeaseEntry(NamedTuple):
    """The lease as it is stored. `holder` None: something that no head wrote is stored there, and does not count."""

    revision: int
    holder: Holder | None


class LeaseView(NamedTuple):
    """The server's answer about the lease. `entry` None: it is free.
    `is_anew`: over another connection than the last."""

    entry: LeaseEntry | None
    is_anew: bool = False


class Lease(Protocol):
    """One process's access to the lease. All methods but `listen` raise LogUnavailable where no answer comes in
    time."""

    async def look(self) -> LeaseView:
        """Return the present holder."""
        ...

    async def acquire_or_renew(self, holder: Holder, after: int) -> LeaseEntry | None:
        """Hold the lease for LEASE_S from now, if its revision is still `after` (0: it is free); return None if it is
        not."""
        ...

    async def announce(self, holder: Holder) -> None:
        """Announce that this head runs; the others know it for ANNOUNCED_S."""
        ...

    async def heads(self) -> list[Holder]:
        """Return the heads that have announced themselves."""
        ...

    async def listen(self, on_news: Callable[[], object], on_beat: Callable[[int], object]) -> None:
        """Call `on_news()` from now on when a head has written the lease, `on_beat(term)` with each beat of a
        coordinator.

        These are hints: what is sent during an outage is not repeated.
        """
        ...
