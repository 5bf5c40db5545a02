"""The head: real coordinators (unicrond/service/coordinator.py), started, crashed and fenced.

A supervisor keeps one alive. A second one may be started beside it at any time (two heads, a restart that came too
early); a fenced one ends for good.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from events.log import Fenced
from events.schemas import FIRST, SCHEMA
from replay.simulation import invariants as rules
from replay.simulation.log_client import BeatEnd, Beats, Boundary, Endpoint
from replay.simulation.log_server import LogServer
from replay.simulation.network import Link
from replay.simulation.virtual_time import HostClock
from replay.simulation.witness import Witness
from unicrond.core.isolation import Repair
from unicrond.core.policy import Policy
from unicrond.intake.readmission import Readmission
from unicrond.service.coordinator import Coordinator
from unicrond.service.repairs import Outcome

#: What heads write.
VERSIONS = (FIRST, 2, 3, SCHEMA, SCHEMA, SCHEMA)
_READMISSION = Readmission(timeout_s=4.0, repair_timeout_s=10.0)


class Head:
    """One coordinator's process."""

    def __init__(self, coordinator: Coordinator, log: Endpoint, task: asyncio.Task[None]) -> None:
        self.coordinator = coordinator
        self.log = log
        self.task = task
        self.alive = True


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
    ) -> None:
        """`versions`: what draws the schema that each head writes. `repair`: the operator's command; None: there is
        none, people do it."""
        self._loop = loop
        self._drawn = drawn
        self._server = server
        self._beats = beats
        self._witness = witness
        self._policy = policy
        self._heartbeat_s = heartbeat_s
        self._versions = versions
        self._repair = repair
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

    def start(self) -> None:
        """Start one more head."""
        log = Endpoint(self._server, Link(self._loop, self._drawn), self._witness.acknowledged)
        beats = BeatEnd(self._beats, log.link)
        coordinator = Coordinator(
            log,
            beats,
            self._policy,
            self._heartbeat_s,
            self.clock,
            process=f"head:{len(self.heads)}",
            schema=self._versions.choice(VERSIONS),
            readmission=_READMISSION,
            repair=self._repair,
        )
        task = self._loop.create_task(coordinator.run())
        head = Head(coordinator, log, task)
        log.crash = lambda: self.crash(head)
        self.heads.append(head)
        task.add_done_callback(lambda done: self._ended(head, done))

    def keep_one(self) -> None:
        """What a supervisor does."""
        if not self.living:
            self.start()

    def crash(self, head: Head, at: Boundary = "") -> None:
        """SIGKILL, now or at a boundary of its next append."""
        if at:
            head.log.crash_at = at
        elif head.alive:
            head.alive = False
            head.task.cancel()
            self._compare(head)
            self._loop.call_later(self._drawn.uniform(0.2, 2.0), self.keep_one)

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
        self._loop.call_later(self._drawn.uniform(0.2, 2.0), self.keep_one)

    def _compare(self, head: Head) -> None:
        state = head.coordinator.state
        self._witness.broke("coordinators_decide", head.coordinator.fault)
        self._witness.broke("replay_equals_live", rules.replay_equals_live(state, self._witness.states[state.seq]))
