"""A question to NATS and the wait for its answer.

Rules
-----
* No answer means "unknown, ask again", never "no".
* Time in which this process did not listen is not the server's silence (`came`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from nats.aio.msg import Msg

from events.log import LogError

#: A wait for an answer, or for the next message, is made of parts of this length.
ANSWER_PART_S = 0.25
MESSAGE_PART_S = 1.0
#: A part that took so many times its length was one in which we slept; it counts for this share.
ASLEEP = 1.5
ASLEEP_SHARE = 0.125

#: Takes subject, body, headers and the subject for the answer.
Publish: TypeAlias = Callable[[str, bytes, Mapping[str, str] | None, str], Awaitable[None]]


class Unanswered(LogError):
    """No answer to a request: the server may or may not have acted on it."""


class NoAnswer(Unanswered):
    """The session lives, the request was sent, and no answer has come so far."""


class Denied(Unanswered):
    """This login may not publish there: the server has refused, and nothing was done."""


class Inquiry:
    """A request in one session: whichever of its repetitions is answered, the answer counts. Made by `Session` only."""

    def __init__(self, publish: Publish, reply: str) -> None:
        self._publish = publish
        self._reply = reply
        self.subject = ""
        self._answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

    async def ask(self, subject: str, body: bytes, headers: Mapping[str, str] | None, timeout_s: float) -> Msg:
        """Send it, once more perhaps, and wait. Raises as `Session.request`."""
        self.subject = subject
        if self._answer.done() and isinstance(self._answer.exception(), Denied):  # the rights may have changed since
            self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._publish(subject, body, headers, self._reply)
        except TimeoutError:
            raise Unanswered(f"{subject}: not sent within {timeout_s:g} s") from None
        if not await came(self._answer, timeout_s):
            raise NoAnswer(f"{subject}: no answer within {timeout_s:g} s")
        message = self._answer.result()
        self._answer = asyncio.get_running_loop().create_future()
        if message.headers and message.headers.get("Status") == "503":
            raise Unanswered(f"{subject}: no responder on this subject (does the stream exist, is JetStream up?)")
        return message

    def answered(self, message: Msg) -> None:
        """An answer has come; the first one counts."""
        if not self._answer.done():
            self._answer.set_result(message)

    def denied(self) -> None:
        """The server refused it."""
        if not self._answer.done():
            self._answer.set_exception(Denied(f"{self.subject}: the login may not publish there"))
            self._answer.exception()

    def lost(self) -> None:
        """None will come."""
        if not self._answer.done():
            self._answer.set_exception(Unanswered("connection lost before the answer"))
            self._answer.exception()  # nobody may be waiting


async def listened(arrived: asyncio.Event, timeout_s: float) -> bool:
    """Whether it was set while this process listened for `timeout_s`. As `came`, for what is waited for often."""
    left_s = timeout_s
    while left_s > 0 and not arrived.is_set():
        begin_s, part_s = time.monotonic(), min(left_s, MESSAGE_PART_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(part_s):
                await arrived.wait()
        left_s -= _attended_s(begin_s, part_s, MESSAGE_PART_S)
    return arrived.is_set()


async def came(answer: asyncio.Future[Any], timeout_s: float) -> bool:
    """Whether it came while this process listened for `timeout_s`. Where the process slept, or was busy, the answer may
    be in the socket unread, and it takes a few turns of the loop to read it."""
    left_s = timeout_s
    while left_s > 0 and not answer.done():
        begin_s, part_s = time.monotonic(), min(left_s, ANSWER_PART_S)
        await asyncio.wait([answer], timeout=part_s)
        left_s -= _attended_s(begin_s, part_s, ANSWER_PART_S)
    return answer.done()


def _attended_s(begin_s: float, part_s: float, whole_s: float) -> float:
    """What counts of a part of a wait; a little of one that was slept through (of a whole one, so that every wait
    ends)."""
    slept = time.monotonic() - begin_s > ASLEEP * part_s
    return min(part_s, whole_s * ASLEEP_SHARE) if slept else part_s
