"""The heads: real coordinators (unicrond/service/coordinator.py), started, crashed and fenced.

Without leases, as in older versions, a supervisor keeps one alive. A second one may be started beside it at any time (a
restart that came too early); a fenced one ends for good. With leases (unicrond/service/heads.py) there are two, and a
fenced one stands by.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from events.lease import Holder, MemoryLease
from events.log import Fenced
from events.schemas import FIRST, SCHEMA
from events.vocabulary import CoordinatorStarted
from replay.simulation import invariants as rules
from replay.simulation.lease import LeaseEnd
from replay.simulation.log_client import BeatEnd, Beats, Boundary, Endpoint
from replay.simulation.log_server import LogServer
from replay.simulation.network import Link
from replay.simulation.virtual_time import HostClock
from replay.simulation.witness import Witness
from unicrond.core.isolation import Repair
from unicrond.core.policy import Policy
from unicrond.intake.readmission import Readmission
from unicrond.service import heads
from unicrond.service.coordinator import Coordinator
from unicrond.service.repairs import Outcome

#: What heads write.
VERSIONS = (FIRST, SCHEMA, SCHEMA)
_READMISSION = Readmission(timeout_s=4.0, repair_timeout_s=10.0)


#: A head whose own way to the log was not sound within so long may lose the lease.
_SOUND_S = 5.0


class Head:
    """One coordinator's process. `is_leased`: it leads only while it has the lease."""

    def __init__(
        self, coordinator: Coordinator, log: Endpoint, run: Coroutine[Any, Any, None], *, is_leased: bool
    ) -> None:
        self.coordinator = coordinator
        self.log = log
        self.task = asyncio.create_task(run)
        self.alive = True
        self.is_leased = is_leased
        self.unsound_at_s = -_SOUND_S


class Coordinators:
    """All heads, dead ones too. `link`: the way of every head to the log."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        drawn: random.Random,
        server: LogServer,
        beats: Beats,
        witness: Witness,
        policy: Policy,
        heartbeat_s: float,
        versions: random.Random,
        repair: Callable[[Repair], Awaitable[Outcome]] | None,
        lease: MemoryLease | None,
    ) -> None:
        """`versions`: what draws the schema that each head writes. `repair`: the operator's command; None: there is
        none, people do it. `lease`: what two heads share; None: they know of none."""
        self._loop = loop
        self._drawn = drawn
        self._server = server
        self._beats = beats
        self._witness = witness
        self._policy = policy
        self._heartbeat_s = heartbeat_s
        self._versions = versions
        self._repair = repair
        self.lease = lease
        #: The head that claimed the newest term.
        self._ruler: Head | None = None
        self.clock = HostClock(loop)
        self.heads: list[Head] = []

    @property
    def living(self) -> list[Head]:
        """Heads that run, the oldest first."""
        return [head for head in self.heads if head.alive]

    @property
    def links(self) -> list[Link]:
        """The living heads' ways to the log."""
        return [head.log.link for head in self.living]

    def start(self, *, is_leased: bool = True) -> None:
        """Start one more head. `is_leased`: where this cluster has leases; else it is of an older version."""
        lease = self.lease if is_leased else None
        name = f"head:{len(self.heads)}"
        log = Endpoint(self._server, Link(self._loop, self._drawn), self._witness.acknowledged)
        beats = BeatEnd(self._beats, log.link)
        coordinator = Coordinator(
            log,
            beats,
            self._policy,
            self._heartbeat_s,
            self.clock,
            process=name,
            schema=self._versions.choice(VERSIONS),
            readmission=_READMISSION,
            repair=self._repair,
        )
        run = coordinator.run() if lease is None else self._as_one_of_two(name, coordinator, lease, log).run()
        head = Head(coordinator, log, run, is_leased=lease is not None)
        log.crash = lambda: self.crash(head)
        self.heads.append(head)
        head.task.add_done_callback(lambda done: self._ended(head, done))

    def _as_one_of_two(self, name: str, coordinator: Coordinator, lease: MemoryLease, log: Endpoint) -> heads.Head:
        return heads.Head(
            coordinator,
            LeaseEnd(lease, self._server, self._beats, log.link),
            Holder(head=name, process=name),
            self._heartbeat_s,
            self.clock,
            is_patient=bool(self.heads),
            gone=lambda _: False,
        )

    def keep(self) -> None:
        """What supervisors do: one head, or two where they have a lease."""
        while len(self.living) < (1 if self.lease is None else 2):
            self.start()

    async def watch(self) -> None:
        """Where there are leases: whose way to the log was not sound, and when. Until cancelled."""
        while self.lease is not None:
            for head in self.living:
                if not head.log.link.is_sound:
                    head.unsound_at_s = self._loop.time()
            await asyncio.sleep(0.1)

    def claimed(self, claim: CoordinatorStarted) -> None:
        """A term is claimed, and the log holds it."""
        before, names = self._ruler, {f"head:{number}": head for number, head in enumerate(self.heads)}
        self._ruler = names.get(claim.process, before)
        is_other = before is not self._ruler and self._ruler is not None and self._ruler.is_leased
        if is_other and before is not None and before.alive and before.is_leased:
            well_s = self._loop.time() - before.unsound_at_s
            self._witness.broke("leaders_stay", rules.leaders_stay(claim, well_s, _SOUND_S))

    def crash(self, head: Head, at: Boundary = "") -> None:
        """SIGKILL, now or at a boundary of its next append."""
        if at:
            head.log.crash_at = at
        elif head.alive:
            head.alive = False
            head.task.cancel()
            self._compare(head)
            self._loop.call_later(self._drawn.uniform(0.2, 2.0), self.keep)

    def _ended(self, head: Head, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        head.alive = False
        error: BaseException | None = task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, Fenced):
            self._witness.broke("nothing_crashes", f"coordinator: {type(error).__name__}: {error}")
        self._compare(head)
        self._loop.call_later(self._drawn.uniform(0.2, 2.0), self.keep)

    def _compare(self, head: Head) -> None:
        state = head.coordinator.state
        self._witness.broke("coordinators_decide", head.coordinator.fault)
        self._witness.broke("replay_equals_live", rules.replay_equals_live(state, self._witness.states[state.seq]))
