"""Looks whether the log is still the one that this agent knows (known_log.py), and waits for a person where it is not,
or where it is gone.

The log is asked at the start, with each new connection, when a coordinator claims a term, when an append is
acknowledged under a number that was given already, and every LOOK_EVERY_S. Mid-way a difference has to be seen twice:
a server that lags behind may answer once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from agents.known_log import difference, is_taken
from agents.state import LogSeen, Remembered
from events.nats_connection import Connection, Session, Unanswered
from events.nats_streams import NO_STREAM, ApiError, api_once
from events.nats_terms import Terms
from events.subjects import EVENT_STREAM

logger = logging.getLogger(__name__)

CURE = "Restore the log, or take it as it is: unicrond run --new-log (docs/operate/recovery.md)"
_CURE_OF_NONE = "Restore the log, or begin a new one: unicrond run --new-log (docs/operate/recovery.md)"
LOOK_EVERY_S = 15.0
_SOON_S = 0.1
_AGAIN_S = 0.5
_AGAIN_MAX_S = 2.0
#: Times that the server does not answer though it is connected: the agent may lack the right to ask.
_ATTEMPTS = 3
_SAY_EVERY_S = 60.0


class LogGuard:
    """`trouble`: why the log is not the known one, in one line; "" where it is."""

    def __init__(
        self,
        connection: Connection,
        terms: Terms,
        memory: Callable[[], Remembered],
        read_seq: Callable[[], int],
        may_take: Callable[[], bool],
    ) -> None:
        """`may_take`: whether this agent may take whatever log is there."""
        self._connection = connection
        self._terms = terms
        self._memory = memory
        self._read_seq = read_seq
        self._may_take = may_take
        self._look = asyncio.Event()
        #: The last session in which the log was the known one.
        self._trusted: Session | None = None
        self._asked = asyncio.Event()
        self.trouble = ""

    def look(self) -> None:
        """There is a reason to look at once."""
        self._look.set()

    async def trusts(self, session: Session) -> None:
        """Until the log that this session reaches was found to be the known one, or the session is lost."""
        while self._trusted is not session and not session.lost.is_set():
            self._look.set()
            waits = [asyncio.create_task(one.wait()) for one in (self._asked, session.lost)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    @property
    def is_sure(self) -> bool:
        """Whether the log was found to be the known one on the connection of now."""
        return self._trusted is not None and not self._trusted.lost.is_set()

    async def known(self) -> LogSeen:
        """The log, once it is the known one or may be taken."""
        told, told_s, looks, pause_s = "", 0.0, 0, 0.0
        while True:
            self._look.clear()
            session = await self._connection.session()
            seen = await self._ask(warns=True)
            why = difference(self._memory(), seen, self._read_seq())
            may_take = self._may_take()
            if seen is not None and (not why or is_taken(self._memory(), seen) or may_take):
                self._begin(why, seen)
                self._trust(session)
                return seen
            looks += 1
            if looks > 1:  # a coordinator that was told to take it, or to make one, may be about to do so
                self.trouble = "" if may_take else why
                line = _waiting(self.trouble, is_gone=seen is None)
                if line != told or time.monotonic() - told_s > _SAY_EVERY_S:
                    told, told_s = line, time.monotonic()
                    logger.log(logging.CRITICAL if self.trouble else logging.WARNING, "%s", line)
            pause_s = min(2 * pause_s or (_AGAIN_S if why else _SOON_S), _AGAIN_MAX_S)
            await self._pause(pause_s)

    def _trust(self, session: Session) -> None:
        self._trusted = session
        self._asked.set()
        self._asked = asyncio.Event()

    def _begin(self, why: str, seen: LogSeen) -> None:
        if why:
            how = "a person has taken it" if is_taken(self._memory(), seen) else "nothing of the old one runs here"
            logger.warning("%s: %s, and this agent begins anew there", why, how)
        elif self.trouble:
            logger.warning("the event log is the known one again: this agent goes on")
        self.trouble = ""

    async def until_another(self, note: Callable[[LogSeen], object]) -> None:
        """Until the log is another. `note`: given each answer that is the known one's."""
        doubts = 0
        session = await self._connection.session()
        while doubts < 2:
            if session.lost.is_set():
                session = await self._connection.session()
            elif doubts:
                await asyncio.sleep(_AGAIN_S)
            elif self._trusted is session:
                await self._pause(LOOK_EVERY_S, session.lost)
                if session.lost.is_set():
                    continue
            self._look.clear()
            seen = await self._ask(warns=False)
            if seen is None:
                doubts += 1
            elif not seen.identity:
                self._trust(session)  # nothing can be known
            elif difference(self._memory(), seen, self._read_seq()):
                doubts += 1
            else:
                doubts = 0
                self._trust(session)
                note(seen)

    async def _pause(self, pause_s: float, lost: asyncio.Event | None = None) -> None:
        reasons = [asyncio.create_task(one.wait()) for one in (self._look, lost) if one is not None]
        try:
            await asyncio.wait(reasons, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for reason in reasons:
                reason.cancel()

    async def _ask(self, *, warns: bool) -> LogSeen | None:
        """What the server says; None where it has no such stream.

        Nothing is known ("") where it does not answer though it is connected; `warns` of that.
        """
        unanswered, pause_s, told = 0, 0.1, False
        while unanswered < _ATTEMPTS:
            try:
                info = await api_once(self._connection, f"STREAM.INFO.{EVENT_STREAM}", {})
                claim = await self._terms.newest()
            except Unanswered:
                unanswered += self._connection.is_up
            except ApiError as error:
                if error.code == NO_STREAM:
                    return None
                if not told:
                    told = True
                    logger.warning("NATS cannot say anything of the event log now (%s); asking again", error)
            else:
                return LogSeen(
                    identity=str(info["created"]),
                    last_seq=int(info["state"]["last_seq"]),
                    term=claim.term if claim else 0,
                    taken_us=claim.taken_us if claim else 0,
                )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _AGAIN_MAX_S)
        if warns:
            logger.warning(
                "cannot ask for the event stream's information; allow $JS.API.STREAM.INFO.%s, or start the agent with "
                "--new-log when you recreate the log",
                EVENT_STREAM,
            )
        return LogSeen(identity="")


def _waiting(trouble: str, *, is_gone: bool) -> str:
    """`trouble`: "" where no log is known here, and the first one is to come."""
    if not trouble:
        return "NATS holds no event log yet; this agent waits until the coordinator makes it"
    if is_gone:
        return f"{trouble}: this agent makes no other, and its workers train on. {_CURE_OF_NONE}"
    return f"{trouble}: this agent takes nothing from it and writes nothing to it; its workers train on. {CURE}"
