"""Detects two agents of one name: the one that started first ends itself.

Rules
-----
* Of two agents the one with the higher boot number started later, and prevails: the log ignores the other's
  observations already (fold.py). An agent that hears a beat of a higher boot under its own name ends, for good: a
  supervisor that started it again would only have it take the name back (SUPERSEDED).
* So does an agent that reads a command for a higher boot, or hears a join: it leaves the command where it is
  (shell.py).
* Its workers are no longer the log's, so they end with it; unless the newer one works in the same run directory, and
  adopts them.
* Commands of a name go to the agent that asks first. So a newcomer beats, but does not join, while an older agent is
  heard: the older one has time to end with its workers. The newcomer's predecessor in the run directory is dead (the
  lock), and not waited for.
* A later boot that is only in the log, and is not heard, belongs to no agent: the run directory was lost and the clock
  is behind, or the newer one started and ended while this one was cut off. The number is raised above it, and the agent
  that the supervisor starts again is heard. An agent with a key cannot ask for it: it listens for a while instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM, PREFIX, joins_subject
from unicrond.events.nats.connection import Connection, NoReply, PublishDenied
from unicrond.events.vocabulary import Event, Heartbeat, Name, NodeJoined
from unicrond.events.wire.codec import BadEvent, read

logger = logging.getLogger(__name__)

#: How long a newcomer waits for an older agent to fall silent, at most.
WAIT_MAX_S = 15.0
#: How often the log is asked, beside at every new connection.
_LOOK_EVERY_S = 60.0
_ANSWER_S = 2.0

#: How often an agent looks whether it is shut out.
LOOK_AT_REFUSALS_S = 1.0


def is_shut_out(denied_s: float | None, lease_s: float, workers: int) -> bool:
    """Return whether an agent whose own key has been refused for `denied_s` seconds (None: it is not) ends: nothing can
    tell it of a newer agent any more. While workers train here, the refusal may be a mistake that a person mends; those
    of a node that was replaced end within UNICRON_FAULT_WAIT_S, since the others go on without them."""
    return denied_s is not None and denied_s >= lease_s and not workers


class DuplicateAgents:
    """Tracks what one agent knows of others of its name. Pure; `now_s` is any clock that never steps.

    `newer`: the highest later boot that was heard; `outrun`: the highest that only stands in the log. 0: none.
    """

    def __init__(self, boot: int, previous_boot: int, heartbeat_s: float) -> None:
        """Start with no duplicate known. `previous_boot`: that of the agent before in this run directory, 0 = none."""
        self.boot = boot
        self._previous_boot = previous_boot
        self.silence_s = 2 * heartbeat_s + 0.5
        self._older_heard_s = -float("inf")
        self.newer = 0
        self.outrun = 0

    def note_beat(self, boot: int, now_s: float) -> None:
        """Note a beat of an agent of this name, received just now."""
        if boot > self.boot:
            self.newer = max(self.newer, boot)
        elif boot not in (self.boot, self._previous_boot):
            self._older_heard_s = now_s

    def note_logged(self, boot: int, now_s: float) -> None:
        """Note the last beat or join of the name in the log; its agent may have ended long ago. `boot` 0: it was none
        of these, as what another node has NATS answer there."""
        if boot > self.boot:
            self.outrun = max(self.outrun, boot)
        elif boot:
            self.note_beat(boot, now_s)

    def is_older_there(self, now_s: float) -> bool:
        """Return whether an older agent was heard lately."""
        return now_s - self._older_heard_s < self.silence_s


async def until_alone(duplicates: DuplicateAgents, can_beat: asyncio.Event, now_s: Callable[[], float]) -> bool:
    """Wait until no older agent is heard; that one ends once it hears our beats. Return False after WAIT_MAX_S."""
    if duplicates.is_older_there(now_s()):
        await can_beat.wait()
        until_s = now_s() + WAIT_MAX_S
        while duplicates.is_older_there(now_s()) and now_s() < until_s:  # noqa: ASYNC110  # silence raises no event
            await asyncio.sleep(0.1)
    return not duplicates.is_older_there(now_s())


class DuplicateWatch:
    """Listens and looks for other agents of the name; `on_newer(boot)` and `on_outrun(boot)` are called in the loop,
    once.

    `look`: set where there is a reason to look at once. `on_echo`: called with each own beat that NATS gives back.
    """

    def __init__(
        self,
        connection: Connection,
        node: Name,
        duplicates: DuplicateAgents,
        look: asyncio.Event,
        on_newer: Callable[[int], None],
        on_outrun: Callable[[int], None],
        on_echo: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._connection = connection
        self._node = node
        self._duplicates = duplicates
        self._look_at_once = look
        self._on_newer = on_newer
        self._on_outrun = on_outrun
        self._on_echo = on_echo
        self._looked = asyncio.Event()

    async def run(self) -> None:
        """Watch until cancelled."""

        async def on_beat(message: object) -> None:
            event = _event_in(message.data)  # type: ignore[attr-defined]  # a nats Msg
            if isinstance(event, Heartbeat):
                self._duplicates.note_beat(event.agent_boot, time.monotonic())
                if event.agent_boot == self._duplicates.boot:
                    self._on_echo(event.beat)
            if self._duplicates.newer:
                self._on_newer(self._duplicates.newer)

        async def on_join(message: object) -> None:
            boot = _boot_in(message.data)  # type: ignore[attr-defined]  # a nats Msg
            self._duplicates.note_logged(boot, time.monotonic())
            if self._duplicates.outrun:
                self._look_at_once.set()

        await self._connection.subscribe(f"{PREFIX}.beat.{self._node}", on_beat)
        await self._connection.subscribe(joins_subject(self._node), on_join)
        while True:
            session = await self._connection.session()
            if not await self._look() and not self._looked.is_set():
                await asyncio.sleep(self._duplicates.silence_s)  # an older one would be heard by then
            if self._duplicates.outrun:
                await asyncio.sleep(self._duplicates.silence_s)
                if not self._duplicates.newer:
                    self._on_outrun(self._duplicates.outrun)
                    return
            self._looked.set()
            waits = [asyncio.create_task(event.wait()) for event in (session.disconnected, self._look_at_once)]
            try:
                await asyncio.wait(waits, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            self._look_at_once.clear()

    async def alone(self, can_beat: asyncio.Event) -> None:
        """Wait until no older agent is heard; that one ends once it hears our beats (`can_beat`). Bounded."""
        await self._looked.wait()
        if self._duplicates.is_older_there(time.monotonic()):
            logger.warning("an older agent of the name %s may be running: waiting until it ends", self._node)
            if not await until_alone(self._duplicates, can_beat, time.monotonic):
                logger.error(
                    "the older agent of the name %s does not end: joining beside it; stop that agent", self._node
                )

    async def _look(self) -> bool:
        """Read the last beat and join of the name; return whether this login may.

        A login with a key reads nothing that it could have written (events/trust/logins.py).
        """
        for stream, subject in (
            (BEAT_STREAM, f"{PREFIX}.beat.{self._node}"),
            (EVENT_STREAM, joins_subject(self._node)),
        ):
            try:
                last = await self._connection.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", None, _ANSWER_S)
            except PublishDenied:
                return False
            except NoReply as error:
                logger.info("cannot ask for the last %s: %s", subject, error)
                continue
            if last.data:
                self._duplicates.note_logged(_boot_in(last.data), time.monotonic())
        return True


def _event_in(body: bytes) -> Event | None:
    """Return the event of a message; None where it holds none."""
    try:
        return read(body)[0].event
    except BadEvent:
        return None


def _boot_in(body: bytes) -> int:
    """Return the boot that a beat or a join names; 0 for any other event."""
    event = _event_in(body)
    return event.agent_boot if isinstance(event, Heartbeat | NodeJoined) else 0
