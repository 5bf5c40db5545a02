"""Checks that the event log is still the one that this agent knows (known_event_log.py); where it is not, or is gone,
waits for a person.

The log is asked at the start, with each new connection, when a coordinator claims a term, when an append is
acknowledged under a number that was used already, and every LOOK_EVERY_S. After the start a difference counts only when
it is seen twice: one answer may come from a server that lags behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from unicrond.agents.core.known_event_log import difference, is_taken
from unicrond.agents.core.state import LogSeen, Remembered
from unicrond.events.log import log_identity
from unicrond.events.log.log_identity import LogMark
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, NoReply, Session
from unicrond.events.nats.stored_message import stored_time_us
from unicrond.events.nats.streams import NO_STREAM, JetStreamError, api_once
from unicrond.events.nats.terms import Terms, started_in
from unicrond.events.wire.envelope import Entry

logger = logging.getLogger(__name__)

CURE = "Restore the log, or take it as it is: unicrond run --new-log (docs/operate/recovery.md)"
_CURE_OF_NONE = "Restore the log, or begin a new one: unicrond run --new-log (docs/operate/recovery.md)"
LOOK_EVERY_S = 15.0
_SOON_S = 0.1
_AGAIN_S = 0.5
_AGAIN_MAX_S = 2.0
#: How often the server may fail to answer though it is connected: the agent may lack the right to ask.
_ATTEMPTS = 3
_SAY_EVERY_S = 60.0


class LogGuard:
    """Compares the event log with the known one. `trouble`: the difference in one line; "" where there is none."""

    def __init__(
        self,
        connection: Connection,
        terms: Terms,
        memory: Callable[[], Remembered],
        read_seq: Callable[[], int],
        may_take: Callable[[], bool],
    ) -> None:
        """Take the sources to ask. `may_take`: whether this agent may accept whatever log is there."""
        self._connection = connection
        self._terms = terms
        self._memory = memory
        self._read_seq = read_seq
        self._may_take = may_take
        self._look = asyncio.Event()
        #: The last session in which the log was the known one.
        self._trusted: Session | None = None
        self._trust_changed = asyncio.Event()
        self.trouble = ""

    def look(self) -> None:
        """Have the log looked at once."""
        self._look.set()

    async def trusts(self, session: Session) -> None:
        """Wait until the log that this session reaches proves to be the known one, or the session is lost."""
        while self._trusted is not session and not session.disconnected.is_set():
            self._look.set()
            waits = [asyncio.create_task(event.wait()) for event in (self._trust_changed, session.disconnected)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    @property
    def is_sure(self) -> bool:
        """Return whether the log has proved to be the known one on the present connection."""
        return self._trusted is not None and not self._trusted.disconnected.is_set()

    async def wait_for_log(self) -> LogSeen:
        """Wait until the log is the known one or may be accepted, and return it."""
        last_line, last_line_s, looks, pause_s = "", 0.0, 0, 0.0
        while True:
            self._look.clear()
            session = await self._connection.session()
            log = await self._ask(warns=True)
            reason = difference(self._memory(), log, self._read_seq())
            may_take = self._may_take()
            if log is not None and (not reason or is_taken(self._memory(), log) or may_take):
                self._begin(reason, log)
                self._trust(session)
                return log
            looks += 1
            if looks > 1:  # a coordinator that was ordered to adopt it, or to make one, may be about to do so
                self.trouble = "" if may_take else reason
                line = _waiting(self.trouble, is_gone=log is None)
                if line != last_line or time.monotonic() - last_line_s > _SAY_EVERY_S:
                    last_line, last_line_s = line, time.monotonic()
                    logger.log(logging.CRITICAL if self.trouble else logging.WARNING, "%s", line)
            pause_s = min(2 * pause_s or (_AGAIN_S if reason else _SOON_S), _AGAIN_MAX_S)
            await self._pause(pause_s)

    def _trust(self, session: Session) -> None:
        self._trusted = session
        self._trust_changed.set()
        self._trust_changed = asyncio.Event()

    def _begin(self, reason: str, log: LogSeen) -> None:
        if reason:
            excuse = "a person has taken it" if is_taken(self._memory(), log) else "nothing of the old one runs here"
            logger.warning("%s: %s, and this agent begins anew there", reason, excuse)
        elif self.trouble:
            logger.warning("the event log is the known one again: this agent goes on")
        self.trouble = ""

    async def wait_until_replaced(self, note: Callable[[LogSeen], object]) -> None:
        """Wait until the log is a different one; call `note` with each answer about the known one."""
        doubts = 0
        session = await self._connection.session()
        while doubts < 2:
            if session.disconnected.is_set():
                session = await self._connection.session()
            elif doubts:
                await asyncio.sleep(_AGAIN_S)
            elif self._trusted is session:
                await self._pause(LOOK_EVERY_S, session.disconnected)
                if session.disconnected.is_set():
                    continue
            self._look.clear()
            log = await self._ask(warns=False)
            if log is None:
                doubts += 1
            elif not log.created:
                self._trust(session)  # nothing can be known
            elif difference(self._memory(), log, self._read_seq()):
                doubts += 1
            else:
                doubts = 0
                self._trust(session)
                note(log)

    async def _pause(self, pause_s: float, session_end: asyncio.Event | None = None) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._look, session_end) if event is not None]
        try:
            await asyncio.wait(waits, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _ask(self, *, warns: bool) -> LogSeen | None:
        """Return the server's information about the log; None where it has no such stream.

        `created` is "" where the server does not answer though it is connected; `warns`: log a warning then.
        """
        unanswered, pause_s, has_warned = 0, 0.1, False
        while unanswered < _ATTEMPTS:
            try:
                info = await api_once(self._connection, f"STREAM.INFO.{EVENT_STREAM}", {})
                claim = await self._terms.newest()
            except NoReply:
                unanswered += self._connection.is_up
            except JetStreamError as error:
                if error.code == NO_STREAM:
                    return None
                if not has_warned:
                    has_warned = True
                    logger.warning("NATS cannot say anything of the event log now (%s); asking again", error)
            else:
                return _log_seen(info, claim)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _AGAIN_MAX_S)
        if warns:
            logger.warning(
                "cannot ask for the event stream's information; allow $JS.API.STREAM.INFO.%s, or start the agent with "
                "--new-log when you recreate the log",
                EVENT_STREAM,
            )
        return LogSeen(created="")


def _log_seen(info: dict[str, Any], claim: Entry | None) -> LogSeen:
    """Return what the stream's information and the newest claim in it say of the log."""
    state, event = info["state"], started_in(claim)
    marks = [log_identity.mark_of(claim)] if claim is not None else []
    if state["messages"] and (claim is None or claim.seq != state["first_seq"]):
        marks.insert(0, LogMark(int(state["first_seq"]), stored_time_us(state["first_ts"]), ""))
    if event and event.log_began_us and all(mark.seq != 1 for mark in marks):
        marks.insert(0, LogMark(1, event.log_began_us, ""))
    return LogSeen(
        created=str(info["created"]),
        last_seq=int(state["last_seq"]),
        marks=tuple(marks),
        term=event.term if event else 0,
        adopted_us=event.adopted_us if event else 0,
    )


def _waiting(trouble: str, *, is_gone: bool) -> str:
    """Return the line about the wait. `trouble`: "" where no log is known here, and the first one is to come."""
    if not trouble:
        return "NATS holds no event log yet; this agent waits until the coordinator makes it"
    if is_gone:
        return f"{trouble}: this agent makes no other, and its workers train on. {_CURE_OF_NONE}"
    return f"{trouble}: this agent takes nothing from it and writes nothing to it; its workers train on. {CURE}"
