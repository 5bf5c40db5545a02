"""A question to NATS and the wait for its answer.

Rules
-----
* No answer means "unknown, ask again", never "no".
* Time in which this process did not listen is not the server's silence (`wait_for_answer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from nats.aio.msg import Msg

from unicrond.events.log.event_log import LogError

#: A wait for an answer, or for the next message, is made of parts of this length.
ANSWER_PART_S = 0.25
MESSAGE_PART_S = 1.0
#: A part that took so many times its length was one in which we slept; it counts for this share.
ASLEEP = 1.5
ASLEEP_SHARE = 0.125

#: Takes subject, body, headers and the subject for the answer.
Publish: TypeAlias = Callable[[str, bytes, Mapping[str, str] | None, str], Awaitable[None]]


class NoReply(LogError):
    """A request got no answer: the server may or may not have acted on it."""


class ReplyTimeout(NoReply):
    """The session lives, the request was sent, and no answer has come so far."""


class PublishDenied(NoReply):
    """The login may not publish there: the server has refused, and nothing was done."""


class Inquiry:
    """A request in one session: whichever of its repetitions is answered, the answer counts. Made only by `Session`."""

    def __init__(self, publish: Publish, reply: str) -> None:
        self._publish = publish
        self._reply = reply
        self.subject = ""
        self._answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

    async def ask(self, subject: str, body: bytes, headers: Mapping[str, str] | None, timeout_s: float) -> Msg:
        """Send the request, perhaps once more, and wait for its answer. Raises what `Session.request` raises."""
        self.subject = subject
        if self._answer.done() and isinstance(
            self._answer.exception(), PublishDenied
        ):  # the rights may have changed since
            self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._publish(subject, body, headers, self._reply)
        except TimeoutError:
            raise NoReply(f"{subject}: not sent within {timeout_s:g} s") from None
        if not await wait_for_answer(self._answer, timeout_s):
            raise ReplyTimeout(f"{subject}: no answer within {timeout_s:g} s")
        message = self._answer.result()
        self._answer = asyncio.get_running_loop().create_future()
        if message.headers and message.headers.get("Status") == "503":
            raise NoReply(f"{subject}: no responder on this subject (does the stream exist, is JetStream up?)")
        return message

    def resolve(self, message: Msg) -> None:
        """Set the answer; the first one counts."""
        if not self._answer.done():
            self._answer.set_result(message)

    def deny(self) -> None:
        """Fail the request: the server refused it."""
        if not self._answer.done():
            self._answer.set_exception(PublishDenied(f"{self.subject}: the login may not publish there"))
            self._answer.exception()

    def fail(self) -> None:
        """Fail the request: the connection is lost, and no answer will come."""
        if not self._answer.done():
            self._answer.set_exception(NoReply("connection lost before the answer"))
            self._answer.exception()  # nobody may be waiting


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event while this process listens for `timeout_s`; return whether it was set.

    Like `wait_for_answer`, for waits that are frequent.
    """
    left_s = timeout_s
    while left_s > 0 and not event.is_set():
        start_s, part_s = time.monotonic(), min(left_s, MESSAGE_PART_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(part_s):
                await event.wait()
        left_s -= _attended_s(start_s, part_s, MESSAGE_PART_S)
    return event.is_set()


async def wait_for_answer(answer: asyncio.Future[Any], timeout_s: float) -> bool:
    """Wait for the answer while this process listens for `timeout_s`; return whether it came.

    Where the process slept, or was busy, the answer may be in the socket unread, and it takes a few turns of the loop
    to read it.
    """
    left_s = timeout_s
    while left_s > 0 and not answer.done():
        start_s, part_s = time.monotonic(), min(left_s, ANSWER_PART_S)
        await asyncio.wait([answer], timeout=part_s)
        left_s -= _attended_s(start_s, part_s, ANSWER_PART_S)
    return answer.done()


def _attended_s(start_s: float, part_s: float, whole_s: float) -> float:
    """Return how much of a part of a wait counts.

    Of a part that was slept through a little counts (of a whole part, so that every wait ends).
    """
    has_slept = time.monotonic() - start_s > ASLEEP * part_s
    return min(part_s, whole_s * ASLEEP_SHARE) if has_slept else part_s
