"""Frames on a stream: 4 bytes big-endian length, then msgpack of one tagged struct. One codec for both ends.

Sans-IO: bytes in, structs out, so that blocking sockets, selectors and asyncio streams share it. A bad frame poisons
its stream (there is no way to find the next boundary that could be trusted): close it and log the reason.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from agents.trainer.messages import MAX_FRAME_BYTES

_HEADER_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class BadFrame(ValueError):
    """The peer sent what is no valid frame of the expected messages; the connection is to be closed."""


def frame(message: msgspec.Struct) -> bytes:
    """One message as a frame. Raises BadFrame where it would be longer than MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"{type(message).__name__} takes {len(body)} bytes, at most {MAX_FRAME_BYTES} may be sent")
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


class Unframer(Generic[T]):
    """Collects bytes and gives the messages that are complete. `expected`: a union of tagged structs."""

    def __init__(self, expected: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(expected)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The messages that `data` completes, in order. Raises BadFrame; the stream is of no use afterwards."""
        self._buffer += data
        messages: list[T] = []
        start = 0
        while len(self._buffer) - start >= _HEADER_BYTES:
            size_bytes = int.from_bytes(self._buffer[start : start + _HEADER_BYTES], "big")
            if size_bytes > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of {size_bytes} bytes is announced, at most {MAX_FRAME_BYTES} are allowed")
            end = start + _HEADER_BYTES + size_bytes
            if len(self._buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(self._buffer[start + _HEADER_BYTES : end])))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise BadFrame(" ".join(str(error).split())) from None
            start = end
        del self._buffer[:start]
        return messages
