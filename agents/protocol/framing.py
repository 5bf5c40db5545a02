"""Frames on a stream: 4 bytes big-endian length, then msgpack of one tagged struct. One codec for both ends.

Sans-IO: bytes in, structs out, so that blocking sockets, selectors and asyncio streams share it. A bad frame poisons
its stream (the next boundary cannot be found reliably): close it and log the reason.

Agents, fork servers and workers outlive each other, so the peer may be of a younger version: a message of a type that
this version does not know is skipped, and unknown fields are set aside.
"""

from __future__ import annotations

import logging
import typing
from typing import Generic, TypeVar

import msgspec

from unicrond.agents.protocol import messages
from unicrond.agents.protocol.messages import MAX_FRAME_BYTES
from unicrond.events.wire.tolerance import without_unknown

logger = logging.getLogger(__name__)
_HEADER_BYTES = 4
#: The tags of all messages, in both directions, and the names of the types in them.
_NAMES = frozenset(
    str(kind.__struct_config__.tag or name) if issubclass(kind, msgspec.Struct) else name
    for name, kind in vars(messages).items()
    if isinstance(kind, type)
)
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class BadFrame(ValueError):
    """The peer sent an invalid frame or an unexpected message; close the connection."""


def frame(message: msgspec.Struct) -> bytes:
    """Return one message as a frame. Raise BadFrame where it would be longer than MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"{type(message).__name__} takes {len(body)} bytes, the limit is {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


class Unframer(Generic[T]):
    """Collects bytes and returns the messages that are complete. `expected`: a union of tagged structs; none is longer
    than `max_bytes`."""

    def __init__(self, expected: object, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        #: How many frames have come, those of unknown types among them.
        self.frames = 0
        self._has_skipped = False
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(expected)
        self._kinds: dict[str, type[msgspec.Struct]] = {
            str(kind.__struct_config__.tag): kind for kind in typing.get_args(expected) or (expected,)
        }
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Return the messages that `data` completes, in order. Raise BadFrame; the stream is of no use afterwards."""
        self._buffer += data
        messages: list[T] = []
        start = 0
        while len(self._buffer) - start >= _HEADER_BYTES:
            size_bytes = int.from_bytes(self._buffer[start : start + _HEADER_BYTES], "big")
            if size_bytes > self._max_bytes:
                raise BadFrame(f"announced frame of {size_bytes} bytes; the limit is {self._max_bytes}")
            end = start + _HEADER_BYTES + size_bytes
            if len(self._buffer) < end:
                break
            self.frames += 1
            message = self._decode(bytes(self._buffer[start + _HEADER_BYTES : end]))
            if message is not None:
                messages.append(message)
            start = end
        del self._buffer[:start]
        return messages

    def _decode(self, body: bytes) -> T | None:
        """Return the message; None for one of a younger version's types. Raise BadFrame."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            try:
                plain = msgspec.msgpack.decode(body)
                name = plain.get("type") if isinstance(plain, dict) else None
                if isinstance(name, str) and name.isidentifier():
                    if name in self._kinds:
                        fields = without_unknown(plain, self._kinds[name])
                        return self._decoder.decode(msgspec.msgpack.encode(fields))
                    if name not in _NAMES:
                        if not self._has_skipped:  # once for a stream: a sender may say it without end
                            logger.warning("skipping an unknown message %s: its sender is of a newer version", name)
                        self._has_skipped = True
                        return None
            except (msgspec.MsgspecError, ValueError, RecursionError):
                pass
            raise BadFrame(" ".join(str(error).split())) from None
