"""The log on NATS JetStream.

Rules
-----
* One append = one message, or one atomic batch (a group commit: one fsync for the lot). An attempt that
  got no answer is repeated with the same message ids, without end or until `give_up_s`.
* A message alone, without a fence, is what agents write: the server itself says where one stands that it repeats, and
  nothing is ever read for it (`_append_one`). Where thousands of agents miss an answer at once, as many readers of the
  stream would stop the server for good.
* The server refuses a batch that repeats an id. Then we look up what stands in the log already, and
  write only the rest.
* A fence is the sequence number of the newest message on the term subject, as the header that the
  server checks before it writes (on the first message of a batch, which holds for all of it). The
  server checks it before the message id, so after a refusal we look whether an earlier attempt of ours
  was written after all.
* A server that has no room refuses, and nothing is lost: an append waits, and `trouble` says why meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from unicrond.events.log.event_log import Fence, Fenced, LogDamaged, LogUnavailable, claimed_term, encode_batch
from unicrond.events.log.log_identity import LogMark
from unicrond.events.log.skips import skips_in
from unicrond.events.log.subjects import (
    BEAT_STREAM,
    BEAT_SUBJECTS,
    EVENT_STREAM,
    SKIP_SUBJECT,
    TERM_SUBJECT,
    MessageIds,
    entry,
    headers,
    subject,
)
from unicrond.events.nats.connection import REQUEST_TIMEOUT_S, Backoff, Connection, NoReply, ReplyTimeout, Session
from unicrond.events.nats.log_proof import LogProof
from unicrond.events.nats.reader import read_batches, read_stream
from unicrond.events.nats.stored_message import StoredMessage, stored_entry
from unicrond.events.nats.streams import DUPLICATE_WINDOW_S, NO_MESSAGE_FOUND, JetStreamError, answer, api
from unicrond.events.vocabulary import CoordinatorStarted, Heartbeat
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent

logger = logging.getLogger(__name__)

#: One secret per process, as each has one boot.
_IDS = MessageIds()
#: Of a batch so much is sent before the server has answered: it refuses what is more than it keeps in memory for a
#: stream (server.BUFFERED_BYTES), and a batch that lacks a message is sent again from its beginning.
UNANSWERED_BYTES = 256 * 1024
WRONG_LAST_SEQUENCE = 10071
#: The same, of a stream of several replicas: another message of that subject is on its way to them.
LAST_SEQUENCE_UNDECIDED = 10164
BATCH_REPEATS_ID = 10201
NO_ROOM = 10023
#: A part of the batch did not arrive (a session was lost in the middle).
BATCH_INCOMPLETE = 10176
#: How long a message alone waits for its answer, at most, before it is sent once more.
ANSWER_MAX_S = 30.0


class _Message(NamedTuple):
    event_id: str
    message_id: str
    subject: str
    headers: dict[str, str]
    body: bytes


class NatsEventLog:
    """An EventLog on JetStream.

    `give_up_s`: after how long without an answer `append` raises LogUnavailable; None = never. `extra_headers`: further
    headers of appended messages. `on_duration`: called with the seconds that each append took. `session_gate`: awaited
    before a message alone is sent in a session: returns once it may be sent, or the session is lost. `proof`: asked in
    each session before anything is read or written there; raises AnotherLog.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        give_up_s: float | None = None,
        extra_headers: Callable[[Envelope], dict[str, str]] = lambda _: {},
        on_duration: Callable[[float], object] = lambda _: None,
        session_gate: Callable[[Session], Awaitable[object]] | None = None,
        proof: LogProof | None = None,
    ) -> None:
        self._session_gate = session_gate
        self._proof = proof
        self._connection = connection
        self._give_up_s = give_up_s
        self._extra_headers = extra_headers
        self._on_duration = on_duration
        #: Why an append waits at this moment, in one line; empty where none does.
        self.trouble = ""

    async def append(self, envelopes: Sequence[Envelope], *, fence: Fence | None = None) -> list[int]:
        """Append a batch (EventLog.append). Tries again over outages, at most `give_up_s` seconds."""
        bodies = encode_batch(envelopes)
        start_s = time.monotonic()
        messages = [
            _Message(
                envelope.event_id,
                (name := _IDS.of(envelope)),
                subject(envelope),
                {**headers(envelope, name), **self._extra_headers(envelope)},
                body,
            )
            for envelope, body in zip(envelopes, bodies, strict=True)
        ]
        async with self._bounded():
            if fence is None and len(messages) == 1:
                seqs = {messages[0].event_id: await self._append_one(messages[0])}
            else:
                seqs = await self._append(messages, fence, min((e.based_on for e in envelopes), default=0))
        self._on_duration(time.monotonic() - start_s)
        return [seqs[message.event_id] for message in messages]

    async def claim_term(self, envelope: Envelope) -> Fence:
        """Claim a term (EventLog.claim_term). Tries again over outages, at most `give_up_s` seconds."""
        term = claimed_term(envelope)
        # Without a message id: two claims of one term would have the same one, and a server that looks at it first (a
        # stream of several replicas does) would acknowledge the other's claim to us as a repeat of ours.
        marks = headers(envelope)
        del marks["Nats-Msg-Id"]
        message = _Message(envelope.event_id, "", TERM_SUBJECT, marks, encode(envelope))
        async with self._bounded():
            return await self._claim(term, message, envelope)

    async def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        """Yield entries (EventLog.read). Waits through outages."""
        async with aclosing(self.read_batches(after_seq, until_seq=until_seq)) as batches:
            async for batch in batches:
                for log_entry in batch:
                    yield log_entry

    async def read_batches(
        self, after_seq: int = 0, *, until_seq: int | None = None
    ) -> AsyncGenerator[list[Entry], None]:
        """Yield what `read` yields, in pieces as they come."""
        async with aclosing(self.read_stored(after_seq, until_seq=until_seq)) as batches:
            async for batch in batches:
                yield decode_messages(batch)

    async def read_stored(
        self, after_seq: int = 0, *, until_seq: int | None = None
    ) -> AsyncGenerator[list[StoredMessage], None]:
        """Yield what `read_batches` yields, not yet decoded. Raises LogDamaged where an entry is missing."""
        if until_seq is not None:
            if after_seq >= until_seq:
                return
            await self._require_held(after_seq + 1)
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": after_seq + 1}
        seq = after_seq
        proves = self._proof.require if self._proof is not None else None
        async with aclosing(read_batches(self._connection, EVENT_STREAM, start=start, proves=proves)) as batches:
            async for batch in batches:
                for number, stored in enumerate(batch):
                    seq += 1
                    if stored.seq != seq:
                        # The reader has checked the deliveries: they are not in the stream.
                        if number:
                            yield batch[:number]
                        await self._require_held(seq)
                        raise LogDamaged(f"stream {EVENT_STREAM}: entries {seq} to {stored.seq - 1} are missing")
                    if seq == until_seq:
                        batch = batch[: number + 1]
                        break
                if self._proof is not None:
                    self._proof.note(LogMark(seq, batch[-1].recorded_at_us, ""))
                yield batch
                if seq == until_seq:
                    return

    async def _require_held(self, seq: int) -> None:
        """Raise LogDamaged where the stream begins after `seq`. A stream that holds nothing would let a reader wait."""
        first = int((await self._info())["state"]["first_seq"])
        if first > seq:
            raise LogDamaged(
                f"stream {EVENT_STREAM}: entries {seq} to {first - 1} are missing (they were trimmed and are in the "
                "archive)"
            )

    async def skips(self) -> dict[int, str]:
        """Return the skips (EventLog.skips), with one request for each.
        Raises JetStreamError where the server refuses."""
        entries: list[Entry] = []
        seq = 1
        while True:
            try:
                reply = await api(
                    self._connection, f"STREAM.MSG.GET.{EVENT_STREAM}", {"next_by_subj": SKIP_SUBJECT, "seq": seq}
                )
            except JetStreamError as error:
                if error.code != NO_MESSAGE_FOUND:
                    raise
                return skips_in(entries)
            entries.append(stored_entry(reply["message"]))
            seq = entries[-1].seq + 1

    async def last_seq(self) -> int:
        """Return the newest entry's sequence number (EventLog.last_seq)."""
        return int((await self._info())["state"]["last_seq"])

    async def close(self) -> None:
        """Do nothing: the connection's owner closes it."""

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        """Give up after `give_up_s`. Being cut off anywhere does no harm: appending again finds what was written."""
        try:
            async with asyncio.timeout(self._give_up_s):
                yield
        except TimeoutError:
            raise LogUnavailable(f"no answer from NATS at {self._connection.urls} for {self._give_up_s} s") from None
        finally:
            self.trouble = ""

    async def _append_one(self, message: _Message) -> int:
        """Append one message; wait until it is answered.

        In one session it is sent again only after the server had more time than before: a server that is behind gets no
        extra work, and a late answer counts as well.
        """
        backoff = Backoff("appending")
        while True:
            session = await self._connection.session()
            if self._session_gate is not None:
                await self._session_gate(session)
            timeout_s = REQUEST_TIMEOUT_S
            with session.inquiry() as inquiry:
                while not session.disconnected.is_set():
                    try:
                        reply = await inquiry.ask(message.subject, message.body, message.headers, timeout_s)
                        return int(answer(message.subject, reply.data)["seq"])
                    except ReplyTimeout as error:
                        self._in_trouble(error)
                        backoff.note(error)
                        timeout_s = min(2 * timeout_s, ANSWER_MAX_S) * random.uniform(0.75, 1.0)
                    except NoReply as error:
                        await self._wait(backoff, error)
                    except JetStreamError as error:
                        if not error.is_transient:
                            raise
                        await self._wait(backoff, error)

    async def _append(self, messages: Sequence[_Message], fence: Fence | None, based_on: int) -> dict[str, int]:
        conditions = _expect(fence.seq) if fence is not None else {}
        seqs: dict[str, int] = {}
        backoff = Backoff("appending")
        while fresh := [message for message in messages if message.event_id not in seqs]:
            try:
                seqs |= await self._write(fresh, conditions)
                continue
            except NoReply as error:
                await self._wait(backoff, error)
                continue
            except JetStreamError as error:
                if error.code not in (WRONG_LAST_SEQUENCE, BATCH_REPEATS_ID):
                    if not error.is_transient and error.code not in (BATCH_INCOMPLETE, LAST_SEQUENCE_UNDECIDED):
                        raise
                    await self._wait(backoff, error)
                    continue
                refusal = error
            existing = await self._find(fresh, based_on)
            seqs |= existing
            if len(existing) == len(fresh):
                continue
            if refusal.code == WRONG_LAST_SEQUENCE:
                assert fence is not None, "nothing else was expected"
                raise Fenced(f"term {fence.term} was replaced: {refusal}") from None
            if not existing:
                await backoff.wait_after(refusal)
        return seqs

    async def _claim(self, term: int, message: _Message, envelope: Envelope) -> Fence:
        backoff = Backoff("claiming the term")
        while True:
            newest = await self.newest_term()
            newest_seq = newest.seq if newest is not None else 0
            if isinstance(newest, RecordedEvent) and isinstance(newest.envelope.event, CoordinatorStarted):
                if newest.envelope == envelope:
                    return Fence(term, newest_seq)
                if newest.envelope.event.term >= term and newest_seq > envelope.based_on:
                    raise Fenced(f"term {term} is not above term {newest.envelope.event.term}")
            try:
                seqs = await self._write([message], _expect(newest_seq))
            except NoReply as error:
                await self._wait(backoff, error)
            except JetStreamError as error:
                if not error.is_transient and error.code not in (WRONG_LAST_SEQUENCE, LAST_SEQUENCE_UNDECIDED):
                    raise
                await self._wait(backoff, error)
            else:
                return Fence(term, seqs[message.event_id])

    async def _wait(self, backoff: Backoff, error: NoReply | JetStreamError) -> None:
        """Record the error in `trouble`, and wait before the next attempt."""
        self._in_trouble(error)
        await backoff.wait_after(error)

    def _in_trouble(self, error: NoReply | JetStreamError) -> None:
        if isinstance(error, JetStreamError) and error.code == NO_ROOM:
            self.trouble = "NATS has no room for the log: free disk space there, or raise jetstream max_file_store"
        else:
            self.trouble = f"NATS did not store the events: {error}"

    async def _write(self, messages: Sequence[_Message], conditions: dict[str, str]) -> dict[str, int]:
        """Make one attempt to write; return numbers by event id. Raises NoReply, JetStreamError, AnotherLog."""
        session = await self._connection.session()
        if self._proof is not None:
            await self._proof.require_once(session)
        if len(messages) == 1:
            only = messages[0]
            reply = await session.request(only.subject, only.body, {**only.headers, **conditions})
            return {only.event_id: int(answer(only.subject, reply.data)["seq"])}
        batch_id, unanswered_bytes = uuid.uuid4().hex, 0
        for number, message in enumerate(messages, start=1):
            message_headers = {
                **message.headers,
                **conditions,
                "Nats-Batch-Id": batch_id,
                "Nats-Batch-Sequence": str(number),
            }
            conditions = {}
            unanswered_bytes += len(message.body)
            is_last = number == len(messages)
            if not is_last and unanswered_bytes < UNANSWERED_BYTES:
                await session.publish(message.subject, message.body, message_headers)
                continue
            unanswered_bytes, commit = 0, {"Nats-Batch-Commit": "1"} if is_last else {}
            reply = await session.request(message.subject, message.body, {**message_headers, **commit})
            if is_last or reply.data:  # empty: the server has the batch up to here
                ack = answer(message.subject, reply.data)
        first = int(ack["seq"]) - len(messages) + 1
        return {message.event_id: first + offset for offset, message in enumerate(messages)}

    async def _find(self, messages: Sequence[_Message], based_on: int) -> dict[str, int]:
        """Find which of the messages stand in the log already; return sequence numbers by event id.

        They stand after what they are based on; where that is not known (0), the search goes as far back as the server
        itself recognises ids. The server's clock is compared with the server's clock.
        """
        info = await self._info()
        until_seq = int(info["state"]["last_seq"])
        if until_seq <= based_on:
            return {}
        start: dict[str, Any] = {"deliver_policy": "by_start_sequence", "opt_start_seq": based_on + 1}
        if not based_on:
            since = datetime.fromisoformat(info["ts"]) - timedelta(seconds=DUPLICATE_WINDOW_S + 60)
            if datetime.fromisoformat(info["state"]["last_ts"]) < since:
                return {}
            start = {"deliver_policy": "by_start_time", "opt_start_time": since.isoformat()}
        event_ids = {message.message_id: message.event_id for message in messages}
        seqs: dict[str, int] = {}
        # Unfiltered, so that the last message is sure to come and to end the search.
        async with aclosing(read_stream(self._connection, EVENT_STREAM, start=start, headers_only=True)) as stored:
            async for message in stored:
                event_id = event_ids.get((message.headers or {}).get("Nats-Msg-Id", ""))
                if event_id is not None:
                    seqs.setdefault(event_id, message.seq)
                if message.seq >= until_seq or len(seqs) == len(event_ids):
                    break
        return seqs

    async def newest_term(self) -> Entry | None:
        """Return the entry under which the newest term was claimed. Raises NoReply, JetStreamError."""
        # Not a direct get: that may be answered by a replica that lags behind.
        try:
            reply = await api(self._connection, f"STREAM.MSG.GET.{EVENT_STREAM}", {"last_by_subj": TERM_SUBJECT})
        except JetStreamError as error:
            if error.code == NO_MESSAGE_FOUND:
                return None
            raise
        return stored_entry(reply["message"])

    async def _info(self) -> dict[str, Any]:
        return await api(self._connection, f"STREAM.INFO.{EVENT_STREAM}", {})


class NatsBeatLog:
    """A BeatLog."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def publish(self, envelope: Envelope) -> None:
        """Publish a beat (BeatLog.publish). Raises TypeError on anything but a Heartbeat, BadEvent on an invalid
        one."""
        if not isinstance(envelope.event, Heartbeat):
            raise TypeError(f"envelope.event: expected a Heartbeat, got {type(envelope.event).__name__}")
        await self._connection.publish_now(subject(envelope), encode(envelope), headers(envelope, _IDS.of(envelope)))

    async def subscribe(self) -> AsyncGenerator[Entry, None]:
        """Yield beats from now on (BeatLog.subscribe). After an outage it begins at the present again."""
        # After an interruption from "now" again: by then an old beat would be a false sign of life, and a
        # server that lost its newest beats gives their numbers anew.
        reading = read_stream(
            self._connection,
            BEAT_STREAM,
            start={"deliver_policy": "new"},
            filter_subjects=list(BEAT_SUBJECTS),
            resume=False,
        )
        async with aclosing(reading) as messages:
            async for stored in messages:
                yield entry(stored.seq, stored.recorded_at_us, stored.subject, stored.body, stored.message_id)


def decode_messages(batch: Sequence[StoredMessage]) -> list[Entry]:
    """Decode stored messages into entries."""
    return [
        entry(stored.seq, stored.recorded_at_us, stored.subject, stored.body, stored.message_id) for stored in batch
    ]


def _expect(term_seq: int) -> dict[str, str]:
    """Return the headers with which the server checks a fence."""
    return {
        "Nats-Expected-Last-Subject-Sequence": str(term_seq),
        "Nats-Expected-Last-Subject-Sequence-Subject": TERM_SUBJECT,
    }
