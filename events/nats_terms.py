"""Which coordinator holds the newest term, as the log says it: an agent writes what that coordinator reads.

The subject of the terms is heard as plain NATS messages, and asked for once in every session: the server need not keep
a consumer for each agent. Between a claim and its arrival here an agent may write a younger form once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from nats.aio.msg import Msg

from events.codec import BadEvent, decode
from events.envelope import Entry, Recorded
from events.nats_connection import Connection, Denied, Patience, Unanswered
from events.nats_log import NatsEventLog
from events.nats_streams import ApiError
from events.subjects import EVENT_STREAM, TERM_SUBJECT, entry
from events.vocabulary import CoordinatorStarted

logger = logging.getLogger(__name__)


class Terms:
    """Calls `on_term` with each CoordinatorStarted whose term is above all before it; `on_claim` with any, heard."""

    def __init__(
        self,
        connection: Connection,
        on_term: Callable[[CoordinatorStarted], None],
        on_claim: Callable[[], object] = lambda: None,
    ) -> None:
        self._connection = connection
        self._on_term = on_term
        self._on_claim = on_claim
        self._term = 0

    def forget(self) -> None:
        """Another log has taken the place of the one before: its terms begin anew."""
        self._term = 0

    async def ask(self) -> None:
        """Take the newest in the log, if there is one that can be read. Waits for the server, not for a coordinator."""
        patience = Patience("asking for the coordinator's term")
        while True:
            try:
                newest = await self.newest()
                break
            except Unanswered as error:
                await patience.lose(error)
            except ApiError as error:
                if not error.is_passing:
                    logger.warning(
                        "cannot read the coordinator's term (%s): writing what every version can read", error
                    )
                    return
                await patience.lose(error)
        if newest is not None:
            self._take(newest)

    async def newest(self) -> CoordinatorStarted | None:
        """In the log; None where there is none that can be read. Unanswered, ApiError."""
        found = await self._newest()
        is_claim = isinstance(found, Recorded) and isinstance(found.envelope.event, CoordinatorStarted)
        return found.envelope.event if is_claim else None  # type: ignore[union-attr, return-value]  # as it was just looked at

    async def _newest(self) -> Entry | None:
        try:
            return await NatsEventLog(self._connection).newest_term()
        except Denied:  # a login that may ask for this subject alone, of any replica
            asked = f"$JS.API.DIRECT.GET.{EVENT_STREAM}.{TERM_SUBJECT}"
            found = await self._connection.request(asked, b"")
            marks = found.headers or {}
            if not found.data:
                return None
            return entry(int(marks.get("Nats-Sequence", 0)), 0, TERM_SUBJECT, found.data)

    async def follow(self) -> None:
        """For ever: what is claimed from now on, and what was claimed while there was no session."""
        await self._connection.subscribe(TERM_SUBJECT, self._hear)
        while True:
            session = await self._connection.session()
            await self.ask()
            await session.lost.wait()

    async def _hear(self, message: Msg) -> None:
        try:
            event = decode(message.data).event
        except BadEvent as error:
            logger.warning("a message on %s is not a valid event: %s", TERM_SUBJECT, error.reason)
            return
        if isinstance(event, CoordinatorStarted):
            self._on_claim()
            self._take(event)

    def _take(self, event: CoordinatorStarted) -> None:
        if event.term > self._term:
            self._term = event.term
            self._on_term(event)
