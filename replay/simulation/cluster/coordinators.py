"""The heads: real coordinators (unicrond/service/coordinator/coordinator.py), started, crashed and fenced.

Without leases, as in older versions, a supervisor keeps one alive. A second one may be started beside it at any time (a
restart that came too early); a fenced one ends for good. With leases (unicrond/service/head/head.py) there are two, and
a fenced one becomes the standby."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from unicrond.core.nodes.isolation import Repair
from unicrond.core.state.policy import Policy, Readmission
from unicrond.events.log.event_log import Fenced
from unicrond.events.log.lease import Holder
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.schemas import FIRST, SCHEMA
from unicrond.replay.simulation.checks import invariants as rules
from unicrond.replay.simulation.cluster.lease import LeaseEnd, MemoryLease
from unicrond.replay.simulation.cluster.log_client import BeatEnd, Boundary, ClusterParts, Endpoint
from unicrond.replay.simulation.models.network import Link
from unicrond.replay.simulation.models.virtual_time import HostClock
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.repairs import RepairOutcome
from unicrond.service.coordinator.surroundings import HeadSettings
from unicrond.service.head import head as heads

#: The schemas that heads write.
VERSIONS = (FIRST, SCHEMA, SCHEMA)
_READMISSION = Readmission(timeout_s=4.0, repair_timeout_s=10.0)


#: A head whose own link to the log was not sound within so long may lose the lease.
_SOUND_S = 5.0
#: Of several types of GPU, each plan made ahead takes real time; here nobody waits for it.
_AHEAD_MAX = 2


class SimulatedHead:
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
    """All heads, dead ones too, and their links to the log."""

    def __init__(
        self,
        parts: ClusterParts,
        rng: random.Random,
        policy: Policy,
        versions: random.Random,
        repair: Callable[[Repair], Awaitable[RepairOutcome]] | None,
        lease: MemoryLease | None,
    ) -> None:
        """Start no head yet. `versions`: draws the schema that each head writes. `repair`: the
        operator's command; None: people repair nodes. `lease`: what two heads share; None: there are no leases."""
        self._parts = parts
        self._rng = rng
        self._policy = policy
        self._versions = versions
        self._repair = repair
        self.lease = lease
        #: The head that claimed the newest term.
        self._leader: SimulatedHead | None = None
        self.clock = HostClock(parts.loop)
        self.heads: list[SimulatedHead] = []

    @property
    def living(self) -> list[SimulatedHead]:
        """List the heads that run, the oldest first."""
        return [head for head in self.heads if head.alive]

    @property
    def leads(self) -> bool:
        """Check that the head lives that claimed the newest term."""
        return self._leader is not None and self._leader.alive

    @property
    def links(self) -> list[Link]:
        """List the living heads' links to the log."""
        return [head.log.link for head in self.living]

    def start(self, *, is_leased: bool = True) -> None:
        """Start one more head. `is_leased`: it uses the lease where this cluster has one; else it is of an older
        version."""
        lease = self.lease if is_leased else None
        name = f"head:{len(self.heads)}"
        log = Endpoint(self._parts.server, Link(self._parts.loop, self._rng), self._parts.checker.acknowledged)
        beats = BeatEnd(self._parts.beats, log.link)
        settings = HeadSettings(
            policy=self._policy,
            heartbeat_s=self._parts.heartbeat_s,
            readmission=_READMISSION,
            schema=self._versions.choice(VERSIONS),
            process=name,
        )
        coordinator = Coordinator(log, beats, settings, self.clock, repair=self._repair)
        coordinator.foresight.ahead_max = _AHEAD_MAX
        run = coordinator.run() if lease is None else self._as_one_of_two(name, coordinator, lease, log).run()
        head = SimulatedHead(coordinator, log, run, is_leased=lease is not None)
        log.crash = lambda: self.crash(head)
        self.heads.append(head)
        head.task.add_done_callback(lambda task: self._ended(head, task))

    def _as_one_of_two(self, name: str, coordinator: Coordinator, lease: MemoryLease, log: Endpoint) -> heads.Head:
        return heads.Head(
            coordinator,
            LeaseEnd(lease, self._parts.server, self._parts.beats, log.link),
            Holder(head=name, process=name),
            self._parts.heartbeat_s,
            self.clock,
            is_patient=bool(self.heads),
            has_ended=lambda _: False,
        )

    def keep(self) -> None:
        """Restart heads as supervisors do: one, or two where they have a lease."""
        while len(self.living) < (1 if self.lease is None else 2):
            self.start()

    async def watch(self) -> None:
        """Note when a head's link to the log was not sound, where there are leases, until cancelled."""
        while self.lease is not None:
            for head in self.living:
                if not head.log.link.is_sound:
                    head.unsound_at_s = self._parts.loop.time()
            await asyncio.sleep(0.1)

    def on_claim(self, claim: CoordinatorStarted) -> None:
        """Check that the head before had no sound link, when a term is claimed and the log holds the claim."""
        previous, names = self._leader, {f"head:{number}": head for number, head in enumerate(self.heads)}
        self._leader = names.get(claim.process, previous)
        is_other = previous is not self._leader and self._leader is not None and self._leader.is_leased
        if is_other and previous is not None and previous.alive and previous.is_leased:
            sound_for_s = self._parts.loop.time() - previous.unsound_at_s
            self._parts.checker.record_breach("leaders_stay", rules.leaders_stay(claim, sound_for_s, _SOUND_S))

    def crash(self, head: SimulatedHead, at: Boundary = "") -> None:
        """Kill the head (SIGKILL), now or at a boundary of its next append."""
        if at:
            head.log.crash_at = at
        elif head.alive:
            head.alive = False
            head.task.cancel()
            self._compare(head)
            self._parts.loop.call_later(self._rng.uniform(0.2, 2.0), self.keep)

    def _ended(self, head: SimulatedHead, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        head.alive = False
        error: BaseException | None = task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, Fenced):
            self._parts.checker.record_breach("nothing_crashes", f"coordinator: {type(error).__name__}: {error}")
        self._compare(head)
        self._parts.loop.call_later(self._rng.uniform(0.2, 2.0), self.keep)

    def _compare(self, head: SimulatedHead) -> None:
        state = head.coordinator.state
        self._parts.checker.record_breach("coordinators_decide", head.coordinator.fault)
        self._parts.checker.record_breach(
            "replay_equals_live", rules.replay_equals_live(state, self._parts.checker.states[state.seq])
        )
