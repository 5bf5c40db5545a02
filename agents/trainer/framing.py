"""Messages <-> bytes on a Unix socket: one codec for asyncio, selectors and blocking sockets alike.

A frame is 4 bytes of big-endian length and then one msgpack map. Nothing here reads or writes: who owns
the socket feeds what arrived and sends what `frame` returns. A bad frame poisons its connection (there is
no way to find the next boundary that could be trusted): close it and log the reason.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from agents.trainer.messages import MAX_FRAME_BYTES, Message

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M", bound=Message)


class BadFrame(ValueError):
    """The peer sent what is no message; the text names the field or the size."""


def frame(message: Message) -> bytes:
    """One message, ready to send; BadFrame where it is longer than MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"{type(message).__name__}: {len(body)} bytes, at most {MAX_FRAME_BYTES} allowed")
    return _LENGTH.pack(len(body)) + body


class Deframer(Generic[M]):
    """Takes bytes as they arrive from one connection and returns the messages that are complete.

    `kind`: the union of the messages that this side may receive, for instance messages.FromWorker.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind, strict=True)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that `data` completes, in order; raises BadFrame, after which it is unusable."""
        self._buffer += data
        messages: list[M] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of {size} bytes was announced, at most {MAX_FRAME_BYTES} allowed")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[start + _LENGTH.size : end])
            try:
                messages.append(self._decoder.decode(body))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise BadFrame(" ".join(str(error).split())) from None
            start = end
        del self._buffer[:start]
        return messages
