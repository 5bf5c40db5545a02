"""Reading a stream in order, from any sequence, over every kind of outage.

Rules
-----
* An ephemeral push consumer in the server's memory delivers into an inbox of ours; its own delivery
  numbers (1, 2, 3, ...) tell at once when a message was dropped on the way.
* The server sends a heartbeat when it has nothing else to say. Silence for SILENCE_S in which we listened, a dropped
  message or a lost session all mean the same: throw the consumer away, make a new one after the last sequence.
* Flow control is answered when we *take* the request from the queue, not when it arrives: a slow reader
  holds the server back instead of being cut off.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import nats.errors

from unicrond.events.nats.connection import Backoff, Connection, NoReply, Session, parse_headers
from unicrond.events.nats.direct_reads import DirectReads
from unicrond.events.nats.request_reply import wait_for_event
from unicrond.events.nats.stored_message import StoredMessage, delivery, message_id_in
from unicrond.events.nats.streams import NANOS, JetStreamError, answer

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1
SILENCE_S = 3.0
INACTIVE_S = 30
#: How the names of readers' consumers begin.
READS = "reads-"
BATCH = 500


_ACK = b"$JS.ACK."


class _RawMessage(NamedTuple):
    """A message as it came from the socket."""

    subject: bytes
    reply: bytes
    body: bytes
    headers: bytes


class _ConsumerInterrupted(Exception):
    """This consumer delivers nothing more; the text says why."""


async def read_stream(connection: Connection, stream: str, **options: Any) -> AsyncGenerator[StoredMessage, None]:
    """Yield messages of `stream` in order, without end: `read_batches`, one by one. `options`: its other arguments."""
    async with aclosing(read_batches(connection, stream, **options)) as batches:
        async for batch in batches:
            for stored in batch:
                yield stored


async def read_batches(
    connection: Connection,
    stream: str,
    *,
    start: dict[str, Any],
    filter_subjects: Sequence[str] = (),
    headers_only: bool = False,
    resume: bool = True,
    proves: Callable[[Session], Awaitable[object]] | None = None,
) -> AsyncGenerator[list[StoredMessage], None]:
    """Yield messages of `stream` in order, without end; each time those that are there, at most BATCH.

    `start`: where to begin, in the words of JetStream's consumer configuration ("deliver_policy" and what belongs to
    it). After an interruption, reading continues right after what was read last, or with `resume` False at `start`
    again. `proves`: awaited after each beginning, before the first message is given out; what it raises ends the
    reading, except NoReply, which is an interruption.
    """
    backoff = Backoff(f"reading {stream}")
    while True:
        session = await connection.session()
        consumer = _Consumer(session, stream) if session.makes_consumers else _DirectReader(session, stream)
        interruption: Exception
        try:
            await consumer.open({**start, "filter_subjects": list(filter_subjects), "headers_only": headers_only})
            if proves is not None:  # after the consumer is made: it delivers from the stream that is asked here
                await proves(session)
            async with aclosing(consumer.messages(backoff.reset)) as messages:
                async for batch in messages:
                    if resume:
                        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": batch[-1].seq + 1}
                    backoff.reset()
                    yield batch
        except (_ConsumerInterrupted, NoReply, JetStreamError, nats.errors.Error) as error:
            logger.info("reading %s was interrupted (%s); continuing", stream, error)
            interruption = error
        finally:
            await consumer.close()
        await backoff.wait_after(interruption)


class _DirectReader:
    """A reading by direct gets, in the place of a _Consumer where the login may make none: from a sequence number on,
    all subjects, whole."""

    def __init__(self, session: Session, stream: str) -> None:
        self._reads = DirectReads(session, stream)
        self._seq = 1

    async def open(self, config: dict[str, Any]) -> None:
        """Begin where the configuration of a consumer says."""
        assert config["deliver_policy"] in ("all", "by_start_sequence"), "what readers ask for"
        self._seq = config.get("opt_start_seq", 1)
        await self._reads.open()

    async def messages(self, is_alive: Callable[[], None]) -> AsyncGenerator[list[StoredMessage], None]:
        """Yield batches of messages (_Consumer.messages)."""
        async with aclosing(self._reads.follow(self._seq, is_alive)) as batches:
            async for batch in batches:
                yield batch

    async def close(self) -> None:
        """End it."""
        await self._reads.close()


class _Consumer:
    def __init__(self, session: Session, stream: str) -> None:
        self._session = session
        self._stream = stream
        self._inbox = session.client.new_inbox()
        self._name = f"{READS}{self._inbox.rpartition('.')[2]}"
        self._is_ours = False
        self._queue: deque[_RawMessage] = deque()
        self._arrived = asyncio.Event()
        self._subscription: Any = None
        self._with_headers = False

    async def open(self, config: dict[str, Any]) -> None:
        # No limits: flow control bounds what is on the way.
        """Subscribe to the inbox, and make the consumer on the server."""
        self._subscription = await self._session.subscribe_raw(self._inbox, self._take)
        self._with_headers = bool(config.get("headers_only"))
        subject = f"CONSUMER.CREATE.{self._stream}.{self._name}"
        request = {
            "stream_name": self._stream,
            "action": "create",
            "config": {
                **config,
                "name": self._name,
                "description": f"{self._session.client_name} reads here, in order; it goes when that one does",
                "deliver_subject": self._inbox,
                "ack_policy": "none",
                "max_deliver": 1,
                "flow_control": True,
                "idle_heartbeat": HEARTBEAT_S * NANOS,
                "inactive_threshold": INACTIVE_S * NANOS,
                "mem_storage": True,
                "num_replicas": 1,
            },
        }
        message = await self._session.request(f"$JS.API.{subject}", json.dumps(request).encode())
        answer(subject, message.data)
        self._is_ours = True

    async def messages(self, is_alive: Callable[[], None]) -> AsyncGenerator[list[StoredMessage], None]:
        """Yield batches of messages. `is_alive`: called where the server reports that there is nothing new."""
        delivered = 0
        batch: list[StoredMessage] = []
        loss_watch = asyncio.create_task(self._session.disconnected.wait())
        loss_watch.add_done_callback(lambda _: self._arrived.set())
        try:
            while True:
                await self._wait()
                while self._queue:
                    message = self._queue.popleft()
                    if not message.reply.startswith(_ACK):
                        if batch:
                            yield batch
                            batch = []
                        await self._control(message)
                        is_alive()
                        continue
                    headers = parse_headers(message.headers)[1] if self._with_headers else None
                    number, stored = delivery(
                        message.reply.decode(),
                        message.subject.decode(),
                        message.body,
                        headers,
                        message_id_in(message.headers),
                    )
                    delivered += 1
                    if number != delivered:
                        if batch:
                            yield batch
                        raise _ConsumerInterrupted(f"delivery {delivered} was lost before sequence {stored.seq}")
                    batch.append(stored)
                    if len(batch) == BATCH or not self._queue:
                        yield batch
                        batch = []
        finally:
            loss_watch.cancel()

    async def close(self) -> None:
        """End the subscription and delete the consumer; the server drops one without a listener anyway."""
        if self._subscription is not None and not self._session.disconnected.is_set():
            try:
                await self._session.unsubscribe_raw(self._subscription)
                if self._is_ours:
                    await self._session.publish(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}", b"")
            except (nats.errors.Error, OSError, NoReply):
                logger.debug("the server will remove consumer %s", self._name)

    def _take(self, subject: bytes, reply: bytes, body: bytes, headers: bytes) -> None:
        self._queue.append(_RawMessage(subject, reply, body, headers))
        self._arrived.set()

    async def _wait(self) -> None:
        if self._queue:
            return
        self._arrived.clear()
        if self._session.disconnected.is_set():
            raise _ConsumerInterrupted("connection lost")
        if not await wait_for_event(self._arrived, SILENCE_S):
            raise _ConsumerInterrupted(f"no heartbeat for {SILENCE_S:g} s")

    async def _control(self, message: _RawMessage) -> None:
        status, headers = parse_headers(message.headers)
        if status != "100":
            raise _ConsumerInterrupted(f"the server says {status or 'nothing'} {headers.get('Description', '')}")
        reply = message.reply.decode() or headers.get("Nats-Consumer-Stalled", "")
        if reply:
            await self._session.publish(reply, b"")
