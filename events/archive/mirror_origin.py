"""The origin of a mirror, played by this process: the mirror's server stores what it is sent under the numbers and
times that it is told.

A server numbers and dates what a client publishes. What a mirror copies keeps both, from the subject for the
acknowledgement on which its origin's consumer delivers. A client may not use such subjects, a leafnode may: so this is
a leafnode, as far as a mirror needs one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, NamedTuple

from unicrond.events.log.event_log import LogError
from unicrond.events.log.subjects import PREFIX
from unicrond.events.nats.connection import Login

#: In the place of `$JS.API`, for what the mirror asks its origin.
API = f"{PREFIX}.origin"
ORIGIN = "ORIGIN"
_TIMEOUT_S = 30.0


class OriginMessage(NamedTuple):
    """A message as a mirror is to store it."""

    seq: int
    recorded_at_us: int
    subject: str
    headers: dict[str, str]
    body: bytes


class MirrorOrigin:
    """A leafnode that answers the one question of a mirror, for a consumer, and delivers to it. Made by `connected`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._deliver_subject: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_heard = asyncio.Event()
        self._inbox = self._consumer = ""
        self._number = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, port: int, login: Login) -> AsyncIterator[MirrorOrigin]:
        """Connect to a server of this machine, as long as the context lasts. Raises OSError, LogError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        origin = cls(reader, writer)
        options = {"user": login.user, "pass": login.password, "name": "restore", "headers": True, "protocol": 1}
        writer.write(b"CONNECT %s\r\nLS+ %s.>\r\nPING\r\n" % (json.dumps(options).encode(), API.encode()))
        answering = asyncio.create_task(origin._answer())
        try:
            await _within(origin._is_heard.wait(), "answers no leafnode")
            yield origin
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def wait(self) -> None:
        """Return once a mirror has asked for its consumer, and listens. Raises LogError."""
        await _within(asyncio.shield(self._deliver_subject), "has not asked for the log")

    async def deliver(self, messages: list[OriginMessage]) -> None:
        """Deliver messages, in order. Raises OSError."""
        deliver_subject = await asyncio.shield(self._deliver_subject)
        for message in messages:
            self._number += 1
            reply = (
                f"$JS.ACK.{ORIGIN}.{self._consumer}.1.{message.seq}.{self._number}"
                f".{message.recorded_at_us * 1000}.1@{message.subject}"
            )
            lines = [f"{name}: {value}\r\n" for name, value in message.headers.items()]
            head = f"NATS/1.0\r\n{''.join(lines)}\r\n".encode()
            size_bytes = len(head) + len(message.body)
            self._writer.write(
                f"HMSG {deliver_subject} {reply} {len(head)} {size_bytes}\r\n".encode() + head + message.body + b"\r\n"
            )
        await self._writer.drain()

    async def _answer(self) -> None:
        """Answer what the server asks, until cancelled. Ends where the connection does."""
        while line := await self._reader.readline():
            verb, _, rest = line.strip().partition(b" ")
            if verb == b"PING":
                self._writer.write(b"PONG\r\n")
            elif verb == b"PONG":
                self._is_heard.set()  # it has taken our subscription too, which a mirror does not wait for
            elif verb == b"LS+" and rest.decode() == self._inbox:
                self._deliver_subject.set_result(self._inbox)  # it listens there from now on
            elif verb == b"-ERR" and not self._deliver_subject.done():
                self._deliver_subject.set_exception(LogError(f"the nats-server that restores refuses: {rest.decode()}"))
            elif verb in (b"LMSG", b"HMSG"):
                words = rest.decode().split(" ")
                body = (await self._reader.readexactly(int(words[-1]) + 2))[:-2]
                header_bytes = int(words[-2]) if verb == b"HMSG" else 0
                if ".CONSUMER.CREATE." in words[0]:
                    self._open(words[1], json.loads(body[header_bytes:]))

    def _open(self, reply: str, request: dict[str, Any]) -> None:
        """Answer a mirror that asks for a consumer."""
        config = request["config"]
        if self._inbox:
            return  # it asks again where nothing has come for long; what follows shows whether it has all
        self._consumer, self._inbox = config["name"], config["deliver_subject"]
        counts = {"consumer_seq": 0, "stream_seq": 0}
        answer = {
            "type": "io.nats.jetstream.api.v1.consumer_create_response",
            "stream_name": ORIGIN,
            "name": self._consumer,
            "created": "2026-01-01T00:00:00Z",
            "config": config,
            "delivered": counts,
            "ack_floor": counts,
            "num_pending": 1,
        }
        body = json.dumps(answer).encode()
        self._writer.write(b"LMSG %s %d\r\n%s\r\n" % (reply.encode(), len(body), body))


async def _within(event: Awaitable[object], trouble: str) -> None:
    """Wait for an event at the server. Raises LogError after a while."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await event
    except TimeoutError:
        raise LogError(f"the nats-server that restores {trouble}, within {_TIMEOUT_S:g} s") from None
