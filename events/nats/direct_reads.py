"""Reading a stream by direct gets, for a login that may make no consumer: the server answers, and keeps nothing.

Rules
-----
* A request names the first sequence and how many; the answers come one by one, and then one with the status 204. At the
  end of the stream the answer is 404.
* Any replica may answer. One that lags behind knows less, and never something else: what it lacks comes with a later
  request.
* Each answer names the one before it. A gap, a silence or a lost connection ends this reading, and `reader.py` begins
  another after what was read last.
* A consumer would deliver where its maker says, with the server's rights: why a reader may not have one is in
  `trust/logins.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from unicrond.events.nats.connection import NoReply, Session, parse_headers
from unicrond.events.nats.request_reply import wait_for_event
from unicrond.events.nats.stored_message import StoredMessage, direct_answer

#: So many messages are asked for at a time, and so many bytes.
BATCH = 1000
BATCH_BYTES = 8 * 1024 * 1024
#: How often the end of a stream is asked for more.
POLL_S = 0.1
#: How long an answer may take.
ANSWER_S = 3.0


class DirectReads:
    """Direct gets of one stream in one session."""

    def __init__(self, session: Session, stream: str) -> None:
        self._session = session
        self._stream = stream
        self._inbox = session.client.new_inbox()
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._arrived = asyncio.Event()
        self._subscription: Any = None
        self._loss_watch: asyncio.Task[bool] | None = None

    async def open(self) -> None:
        """Listen for answers."""
        self._subscription = await self._session.subscribe_raw(self._inbox, self._take)
        self._loss_watch = asyncio.create_task(self._session.disconnected.wait())
        self._loss_watch.add_done_callback(lambda _: self._arrived.set())

    async def present(self, seq: int, subject: str = ">") -> AsyncGenerator[list[StoredMessage], None]:
        """Yield the messages on `subject` from `seq` on, in batches, until the stream has no more. Raises NoReply."""
        await self._ask(seq, subject)
        while True:
            batch, is_end = await self._answers()
            if batch and not is_end:
                await self._ask(batch[-1].seq + 1, subject)  # answered while the reader works on this batch
            if batch:
                yield batch
            if is_end or not batch:
                return

    async def follow(self, seq: int, is_alive: Callable[[], None]) -> AsyncGenerator[list[StoredMessage], None]:
        """Yield the messages from `seq` on, without end. `is_alive`: called where there is nothing new. Raises
        NoReply."""
        while not self._session.disconnected.is_set():
            async for batch in self.present(seq):
                yield batch
                seq = batch[-1].seq + 1
            is_alive()
            await wait_for_event(self._session.disconnected, POLL_S)
        raise NoReply("connection lost")

    async def close(self) -> None:
        """Listen no more."""
        if self._loss_watch is not None:
            self._loss_watch.cancel()
        if self._subscription is not None and not self._session.disconnected.is_set():
            await self._session.unsubscribe_raw(self._subscription)

    async def _answers(self) -> tuple[list[StoredMessage], bool]:
        """Return the answers to one request, and whether the stream has no more."""
        batch: list[StoredMessage] = []
        while True:
            raw_headers, body = await self._next()
            try:
                answer = direct_answer(raw_headers, body)
            except ValueError as error:
                raise NoReply(f"direct get of {self._stream}: an answer cannot be read: {error!r}") from None
            if answer is None:
                return batch, self._is_end(raw_headers)
            last_seq, message = answer
            if batch and last_seq != batch[-1].seq:
                raise NoReply(f"direct get of {self._stream}: answers before sequence {message.seq} were lost")
            batch.append(message)

    def _is_end(self, raw_headers: bytes) -> bool:
        """Say whether the end of an answer is the end of the stream. Raises NoReply where it is an error."""
        status, headers = parse_headers(raw_headers)
        if status not in ("204", "404"):
            raise NoReply(f"direct get of {self._stream}: {status} {headers.get('Description', '')}")
        return status == "404" or headers.get("Nats-Num-Pending") == "0"

    async def _ask(self, seq: int, subject: str) -> None:
        request = {"seq": seq, "batch": BATCH, "max_bytes": BATCH_BYTES, "next_by_subj": subject}
        await self._session.publish(
            f"$JS.API.DIRECT.GET.{self._stream}", json.dumps(request).encode(), reply=self._inbox
        )

    async def _next(self) -> tuple[bytes, bytes]:
        while not self._queue:
            self._arrived.clear()
            if self._session.disconnected.is_set():
                raise NoReply("connection lost")
            if not await wait_for_event(self._arrived, ANSWER_S):
                raise NoReply(f"direct get of {self._stream}: no answer within {ANSWER_S:g} s")
        return self._queue.popleft()

    def _take(self, _subject: bytes, _reply: bytes, body: bytes, headers: bytes) -> None:
        self._queue.append((headers, body))
        self._arrived.set()
