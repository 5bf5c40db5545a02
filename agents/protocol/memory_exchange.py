"""States from one node's memory to another's: what is said over TCP, and how it is asked for.

A connection carries one request and its answer, each a frame (`framing.py`) and, where a state goes with it, its bytes:

    Ask    ->  Holds                       which states of the task the node keeps
    Fetch  ->  Fetched, bytes              one of them
    Push   ->  Accepted; bytes -> Stored   a copy, to be kept there
           ->  Refused                     anything else: the reason

Every request names the token of the node that it asks: it was told with the membership, by the log. Heads carry the
digest of the bytes; bytes without it are not believed. Blocking sockets, with a bound on every wait. No torch here.
"""

from __future__ import annotations

import socket
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from agents.protocol.framing import frame
from agents.protocol.memory import Head
from agents.protocol.messages import Message
from events.vocabulary import Count, MemoryService, Name, Text

CONNECT_TIMEOUT_S = 2.0
#: No byte for so long: the other side is gone.
SILENCE_TIMEOUT_S = 10.0
_FRAME_MAX_BYTES = 64 * 1024
_CHUNK_BYTES = 1 << 20
#: tp or pp, as a head has room for.
Degree: TypeAlias = Annotated[int, Meta(ge=1, lt=2**32)]
Digest: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]


class HeadOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `memory.Head` on its way."""

    iteration: Count
    generation: Count
    size_bytes: Count
    digest: Digest
    tp: Degree
    pp: Degree

    @staticmethod
    def of(head: Head) -> HeadOf:
        """The message with the fields of `head`."""
        return HeadOf(**msgspec.structs.asdict(head))

    def head(self) -> Head:
        """The head that this message carries."""
        return Head(**msgspec.structs.asdict(self))


class HeldShard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of one shard, newest first."""

    shard: Count
    heads: tuple[HeadOf, ...]


class Ask(Message, frozen=True, kw_only=True):
    """Request: which states of the task do you keep?"""

    token: Text
    task: Name


class Fetch(Message, frozen=True, kw_only=True):
    """One of the states that were told: the shard's, of a replica of tp * pp, after `iteration`."""

    token: Text
    task: Name
    shard: Count
    iteration: Count
    tp: Degree
    pp: Degree


class Push(Message, frozen=True, kw_only=True):
    """`origin`: the node that captured the state."""

    token: Text
    task: Name
    shard: Count
    origin: Name
    head: HeadOf


class Holds(Message, frozen=True, kw_only=True):
    """Answer to Ask: the kept shards."""

    shards: tuple[HeldShard, ...]


class Fetched(Message, frozen=True, kw_only=True):
    """Answer to Fetch: the state's bytes follow."""

    head: HeadOf


class Accepted(Message, frozen=True, kw_only=True):
    """First answer to Push: the bytes may come."""


class Stored(Message, frozen=True, kw_only=True):
    """Last answer to Push: the state is kept."""


class Refused(Message, frozen=True, kw_only=True):
    """Answer to any request: no, with the reason."""

    reason: Text


Request: TypeAlias = Ask | Fetch | Push
Answer: TypeAlias = Holds | Fetched | Accepted | Stored | Refused
T = TypeVar("T")
A = TypeVar("A", Holds, Fetched, Accepted, Stored)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class NoAnswer(Exception):
    """The node cannot be reached, refuses, or does not keep its word. The text says which."""


def ask(service: MemoryService, task: str) -> dict[int, list[Head]]:
    """What the node keeps of the task, by shard, newest first. Raises NoAnswer."""
    with _connected(service) as connection:
        say(connection, Ask(token=service.token, task=task))
        return {held.shard: [head.head() for head in held.heads] for held in _answer(connection, Holds).shards}


class Fetching:
    """One state on its way here: its head is known, then `receive` takes the bytes. Raises NoAnswer."""

    def __init__(self, service: MemoryService, task: str, shard: int, iteration: int, layout: tuple[int, int]) -> None:
        self._connection = _connected(service)
        tp, pp = layout
        try:
            wanted = Fetch(token=service.token, task=task, shard=shard, iteration=iteration, tp=tp, pp=pp)
            say(self._connection, wanted)
            self.head = _answer(self._connection, Fetched).head.head()
        except BaseException:
            self._connection.close()
            raise

    def receive(self, view: memoryview) -> None:
        """Fill `view`, which has the head's size. The digest is for the caller to check."""
        with self._connection:
            try:
                read_into(self._connection, view)
            except OSError as error:
                raise NoAnswer(f"the transfer of the state broke off: {error}") from None


def push(service: MemoryService, task: str, shard: int, origin: str, head: Head, view: memoryview) -> None:
    """Have the node keep a copy. Raises NoAnswer."""
    with _connected(service) as connection:
        head_of = HeadOf.of(head)
        say(connection, Push(token=service.token, task=task, shard=shard, origin=origin, head=head_of))
        _answer(connection, Accepted)
        try:
            send(connection, view)
        except OSError as error:
            raise NoAnswer(f"the copy broke off: {error}") from None
        _answer(connection, Stored)


# --- both ends -----------------------------------------------------------------------------------


def say(connection: socket.socket, message: Message) -> None:
    """Raises NoAnswer where the other side is gone."""
    try:
        connection.sendall(frame(message))
    except OSError as error:
        raise NoAnswer(str(error)) from None


def hear(connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """One frame. Raises NoAnswer at the end of the stream and on bytes that are no such message."""
    try:
        length = int.from_bytes(_read(connection, 4), "big")
        if length > _FRAME_MAX_BYTES:
            raise NoAnswer(f"announced frame of {length} bytes")
        return decoder.decode(_read(connection, length))
    except (OSError, msgspec.MsgspecError) as error:
        raise NoAnswer(" ".join(str(error).split()) or type(error).__name__) from None


def read_into(connection: socket.socket, view: memoryview) -> None:
    """Fill `view`. Raises OSError."""
    while view:
        count = connection.recv_into(view, min(len(view), _CHUNK_BYTES))
        if not count:
            raise ConnectionError("the connection ended early")
        view = view[count:]


def send(connection: socket.socket, view: memoryview) -> None:
    """In chunks, so that the bound on silence holds for each. Raises OSError."""
    for start in range(0, len(view), _CHUNK_BYTES):
        connection.sendall(view[start : start + _CHUNK_BYTES])


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    read_into(connection, memoryview(data))
    return bytes(data)


def _connected(service: MemoryService) -> socket.socket:
    try:
        connection = socket.create_connection((service.host, service.port), CONNECT_TIMEOUT_S)
    except OSError as error:
        raise NoAnswer(f"node {service.node} cannot be reached: {error}") from None
    connection.settimeout(SILENCE_TIMEOUT_S)
    return connection


def _answer(connection: socket.socket, expected: type[A]) -> A:
    answer = hear(connection, _answers)
    if isinstance(answer, Refused):
        raise NoAnswer(f"refused: {answer.reason}")
    if not isinstance(answer, expected):
        raise NoAnswer(f"{type(answer).__name__} instead of {expected.__name__}")
    return answer
