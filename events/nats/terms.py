"""The newest coordinator's term according to the log: an agent writes what that coordinator reads.

The subject of the terms is subscribed to as plain NATS messages, and read once in every session: the server need not
keep a consumer for each agent. Between a claim and its arrival here an agent may write a younger form once more.

Another node can have answers of NATS delivered on that subject, the newest claim among them (`trust/accounts.py`): a
claim that comes again is none, and what is no event is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from nats.aio.msg import Msg

from unicrond.events.log.subjects import EVENT_STREAM, TERM_SUBJECT, entry
from unicrond.events.nats.connection import Backoff, Connection, NoReply, PublishDenied
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.stored_message import stored_time_us
from unicrond.events.nats.streams import JetStreamError
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.codec import BadEvent, decode
from unicrond.events.wire.envelope import Entry, RecordedEvent

logger = logging.getLogger(__name__)


class Terms:
    """Watches for new terms: calls `on_term` with each CoordinatorStarted whose term is above all before it, and
    `on_claim` with each one that is received."""

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
        self._last_claim = ""
        self._has_warned = False

    def forget(self) -> None:
        """Forget the newest term: another log has replaced the previous one, and its terms begin anew."""
        self._term, self._last_claim = 0, ""

    async def ask(self) -> None:
        """Read the newest term in the log, if it can be read. Waits for the server, not for a coordinator."""
        backoff = Backoff("asking for the coordinator's term")
        while True:
            try:
                newest = await self.newest()
                break
            except NoReply as error:
                await backoff.wait_after(error)
            except JetStreamError as error:
                if not error.is_transient:
                    logger.warning(
                        "cannot read the coordinator's term (%s): writing what every version can read", error
                    )
                    return
                await backoff.wait_after(error)
        if event := started_in(newest):
            self._take(event)

    async def newest(self) -> Entry | None:
        """Return the entry of the newest claim in the log; None where there is none. Raises NoReply, JetStreamError."""
        try:
            return await NatsEventLog(self._connection).newest_term()
        except PublishDenied:  # a login that may ask for this subject alone, of any replica
            subject = f"$JS.API.DIRECT.GET.{EVENT_STREAM}.{TERM_SUBJECT}"
            reply = await self._connection.request(subject, b"")
            if not reply.data:
                return None
            headers = reply.headers or {}
            try:
                seq, at_us = int(headers["Nats-Sequence"]), stored_time_us(headers["Nats-Time-Stamp"])
            except (KeyError, ValueError) as error:
                raise NoReply(f"{subject}: the answer cannot be read: {error!r}") from None
            return entry(seq, at_us, TERM_SUBJECT, reply.data)

    async def follow(self) -> None:
        """Watch for ever: claims from now on, and those made while there was no session."""
        await self._connection.subscribe(TERM_SUBJECT, self._hear)
        while True:
            session = await self._connection.session()
            await self.ask()
            await session.disconnected.wait()

    async def _hear(self, message: Msg) -> None:
        try:
            envelope = decode(message.data)
        except BadEvent as error:
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            logger.log(level, "a message on %s is not a valid event: %s", TERM_SUBJECT, error.reason)
            return
        if isinstance(envelope.event, CoordinatorStarted) and envelope.event_id != self._last_claim:
            self._last_claim = envelope.event_id
            self._on_claim()
            self._take(envelope.event)

    def _take(self, event: CoordinatorStarted) -> None:
        if event.term > self._term:
            self._term = event.term
            self._on_term(event)


def started_in(claim: Entry | None) -> CoordinatorStarted | None:
    """Return the event of a claim; None where there is none, or it cannot be read."""
    event = claim.envelope.event if isinstance(claim, RecordedEvent) else None
    return event if isinstance(event, CoordinatorStarted) else None
