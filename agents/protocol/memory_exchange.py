"""Copies states from one node's memory to another's over TCP.

A connection carries one request and its answer, each a frame (`framing.py`) and, where a state goes with it, its bytes:

    Ask    ->  Holds                       which states of the task the node holds
    Fetch  ->  Fetched, bytes              one of them
    Push   ->  Accepted; bytes -> Stored   a copy, to be stored there
           ->  Refused                     anything else: the reason

Between nodes with certificates all of it goes through TLS 1.3, and a request carries a pass
(agents/memory/peer_tokens.py); the log's token for such a node is the word TLS. Otherwise a request carries the token
of the serving node, which came with the membership, by the log. Neither side falls back to the other method. Heads
carry the digest of the bytes; bytes with another digest are rejected. Blocking sockets, with a bound on every wait. No
torch here.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from unicrond.agents.protocol.framing import frame
from unicrond.agents.protocol.memory import Digesting, StateHead
from unicrond.agents.protocol.messages import Passes, WireMessage
from unicrond.events.trust.tls import NODE_URI
from unicrond.events.vocabulary import Count, MemoryService, Name, Text
from unicrond.events.vocabulary.shape import Shape

CONNECT_TIMEOUT_S = 2.0
#: After this long without a byte the other side counts as dead.
SILENCE_TIMEOUT_S = 10.0
_FRAME_MAX_BYTES = 64 * 1024
_CHUNK_BYTES = 1 << 20
#: A peer that receives or sends a state slower than this is given up.
RATE_MIN_BYTES = 1 << 20
#: In the log, in the place of a token: this node exchanges states over TLS alone.
TLS = "tls"
#: A token, or a pass with its warrant.
Credential: TypeAlias = Annotated[str, Meta(max_length=60 * 1024)]
#: A degree of the layout, as a head has room for.
Degree: TypeAlias = Annotated[int, Meta(ge=1, lt=2**32)]
Digest: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]


class HeadOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `memory.StateHead` as it is sent."""

    iteration: Count
    generation: Count
    size_bytes: Count
    digest: Digest
    tp: Degree
    pp: Degree
    vpp: Degree = 1
    ep: Degree = 1
    cp: Degree = 1
    etp: Count = 0

    @staticmethod
    def of(head: StateHead) -> HeadOf:
        """Return the message with the fields of `head`."""
        return HeadOf(**msgspec.structs.asdict(head))

    def head(self) -> StateHead:
        """Return the head that this message carries."""
        return StateHead(**msgspec.structs.asdict(self))


class HeldShard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The states of one shard in a node's memory, newest first."""

    shard: Count
    heads: tuple[HeadOf, ...]


class Ask(WireMessage, frozen=True, kw_only=True):
    """Request: which states of the task do you hold?"""

    token: Credential
    task: Name


class Fetch(WireMessage, frozen=True, kw_only=True, omit_defaults=True):
    """Request: send one of the listed states: the shard's, of a replica of that layout, after
    `iteration`."""

    token: Credential
    task: Name
    shard: Count
    iteration: Count
    tp: Degree
    pp: Degree
    vpp: Degree = 1
    ep: Degree = 1
    cp: Degree = 1
    etp: Count = 0

    @property
    def layout(self) -> Shape:
        """The layout of the replica."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, cp=self.cp, etp=self.etp)


class Push(WireMessage, frozen=True, kw_only=True):
    """Request: store a copy. `origin`: the node that captured the state."""

    token: Credential
    task: Name
    shard: Count
    origin: Name
    head: HeadOf


class HoldingsAnswer(WireMessage, frozen=True, kw_only=True):
    """Answer to Ask: the shards in memory."""

    shards: tuple[HeldShard, ...]


class FetchAnswer(WireMessage, frozen=True, kw_only=True):
    """Answer to Fetch: the state's bytes follow."""

    head: HeadOf


class PushAccepted(WireMessage, frozen=True, kw_only=True):
    """First answer to Push: the bytes may come."""


class CopyStored(WireMessage, frozen=True, kw_only=True):
    """Last answer to Push: the state is stored. As the first answer: that state or a newer one was there already."""


class RequestRefused(WireMessage, frozen=True, kw_only=True):
    """Answer to any request: no, with the reason."""

    reason: Text


Request: TypeAlias = Ask | Fetch | Push
Answer: TypeAlias = HoldingsAnswer | FetchAnswer | PushAccepted | CopyStored | RequestRefused
T = TypeVar("T")
A = TypeVar("A", bound=WireMessage)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class ExchangeFailed(Exception):
    """The node cannot be reached, refuses, or breaks the protocol. The text says which."""


class BadPass(ValueError):
    """The pass is not valid here; the text says why."""


def ask(service: MemoryService, task: str, passes: Passes | None = None) -> dict[int, list[StateHead]]:
    """Return the heads of the task's states on the node, by shard, newest first. Raise NoAnswer."""
    with _connected(service, passes) as connection:
        send_message(connection, Ask(token=_credential(service, passes), task=task))
        return {
            entry.shard: [head.head() for head in entry.heads] for entry in _answer(connection, HoldingsAnswer).shards
        }


class Fetching:
    """The transfer of one state to this node: its head is known, then `receive` reads the bytes. Raises NoAnswer."""

    def __init__(
        self,
        service: MemoryService,
        task: str,
        shard: int,
        iteration: int,
        layout: Shape,
        passes: Passes | None = None,
    ) -> None:
        self._connection = _connected(service, passes)
        try:
            token = _credential(service, passes)
            cut = {name: size for name, size in layout._asdict().items() if name != "micro_batch"}
            request = Fetch(token=token, task=task, shard=shard, iteration=iteration, **cut)
            send_message(self._connection, request)
            self.head = _answer(self._connection, FetchAnswer).head.head()
        except BaseException:
            self._connection.close()
            raise

    def receive(self, view: memoryview) -> bytes:
        """Fill `view`, which has the head's size, and return the digest of the bytes, for the caller to compare."""
        with self._connection:
            try:
                return receive_into(self._connection, view)
            except OSError as error:
                raise ExchangeFailed(f"the transfer of the state broke off: {error}") from None


def push(
    service: MemoryService,
    task: str,
    shard: int,
    origin: str,
    head: StateHead,
    view: memoryview,
    passes: Passes | None = None,
) -> None:
    """Have the node store a copy, unless it has that state or a newer one already. Raise NoAnswer."""
    with _connected(service, passes) as connection:
        token, head_of = _credential(service, passes), HeadOf.of(head)
        send_message(connection, Push(token=token, task=task, shard=shard, origin=origin, head=head_of))
        if isinstance(_answer(connection, PushAccepted, CopyStored), CopyStored):
            return
        try:
            send(connection, view)
        except OSError as error:
            raise ExchangeFailed(f"the copy broke off: {error}") from None
        _answer(connection, CopyStored)


# --- both ends -----------------------------------------------------------------------------------


def send_message(connection: socket.socket, message: WireMessage) -> None:
    """Send one message. Raise NoAnswer where the other side has closed the connection."""
    try:
        connection.sendall(frame(message))
    except OSError as error:
        raise ExchangeFailed(str(error)) from None


def receive_message(connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Receive one message, within the socket's bound. Raise NoAnswer at the end of the stream and on an invalid
    message."""
    ends_s = time.monotonic() + (connection.gettimeout() or SILENCE_TIMEOUT_S)
    try:
        length = int.from_bytes(_read(connection, 4, ends_s), "big")
        if length > _FRAME_MAX_BYTES:
            raise ExchangeFailed(f"announced frame of {length} bytes")
        return decoder.decode(_read(connection, length, ends_s))
    except (OSError, msgspec.MsgspecError) as error:
        raise ExchangeFailed(" ".join(str(error).split()) or type(error).__name__) from None


def receive_into(connection: socket.socket, view: memoryview) -> bytes:
    """Fill `view` and return the digest of the bytes. Raise OSError."""
    with Digesting(view) as digesting:
        read_into(connection, view, reached=digesting.reached)
        return digesting.digest()


def read_into(
    connection: socket.socket,
    view: memoryview,
    ends_s: float | None = None,
    reached: Callable[[int], None] = lambda _: None,
) -> None:
    """Fill `view`, until `ends_s` of the monotonic clock; None: as RATE_MIN_BYTES allows.

    `reached` is called with the number of bytes that are there. Raise OSError.
    """
    ends_s = _deadline_s(len(view)) if ends_s is None else ends_s
    at, size_bytes = 0, len(view)
    while at < size_bytes:
        _in_time(ends_s)
        count = connection.recv_into(view[at : at + _CHUNK_BYTES])
        if not count:
            raise ConnectionError("the connection ended early")
        at += count
        reached(at)


def send(connection: socket.socket, view: memoryview) -> None:
    """Send `view` in chunks, so that the bound on silence holds for each. Raise OSError."""
    ends_s = _deadline_s(len(view))
    for start in range(0, len(view), _CHUNK_BYTES):
        _in_time(ends_s)
        connection.sendall(view[start : start + _CHUNK_BYTES])


def _read(connection: socket.socket, count: int, ends_s: float) -> bytes:
    data = bytearray(count)
    read_into(connection, memoryview(data), ends_s)
    return bytes(data)


def _deadline_s(size_bytes: int) -> float:
    return time.monotonic() + SILENCE_TIMEOUT_S + size_bytes / RATE_MIN_BYTES


def _in_time(ends_s: float) -> None:
    if time.monotonic() > ends_s:
        raise TimeoutError("the other side is too slow")


def _credential(service: MemoryService, passes: Passes | None) -> str:
    return passes.of(service.node) if passes else service.token


def _connected(service: MemoryService, passes: Passes | None) -> socket.socket:
    """Return a connection to the node, in TLS with `passes`, and only then. Raise NoAnswer."""
    if passes is not None and service.token == TLS and not passes.of(service.node):
        raise ExchangeFailed(f"this node has no pass for node {service.node}")
    if passes is None and service.token == TLS:
        raise ExchangeFailed(
            f"node {service.node} gives states over TLS alone, and this node has no certificate: enroll it"
        )
    if passes is not None and service.token != TLS:
        raise ExchangeFailed(
            f"node {service.node} gives states in clear alone, and this node does not: enroll that node"
        )
    connection = _dialled(service)
    return _secured(connection, service.node, passes.ca) if passes else connection


def _secured(connection: socket.socket, node: str, ca: str) -> socket.socket:
    """Return the connection in TLS; the other side must be the node, by its certificate. Raise NoAnswer."""
    try:
        secured = _context(ca).wrap_socket(connection)
        try:
            names = secured.getpeercert()["subjectAltName"]  # type: ignore[index]  # with CERT_REQUIRED there is one
            if ("URI", f"{NODE_URI}{node}") not in names:
                raise ExchangeFailed(f"another than node {node} answers there: its certificate names {names}")
        except BaseException:
            secured.close()
            raise
    except (OSError, KeyError) as error:
        connection.close()
        raise ExchangeFailed(f"no TLS with node {node}: {error}") from None
    return secured


@lru_cache(maxsize=4)
def _context(ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a node's name is no host's; it is compared above
    context.load_verify_locations(cadata=ca)
    return context


def _dialled(service: MemoryService) -> socket.socket:
    try:
        connection = socket.create_connection((service.host, service.port), CONNECT_TIMEOUT_S)
    except OSError as error:
        raise ExchangeFailed(f"node {service.node} cannot be reached: {error}") from None
    connection.settimeout(SILENCE_TIMEOUT_S)
    return connection


def _answer(connection: socket.socket, *expected: type[A]) -> A:
    answer = receive_message(connection, _answers)
    if isinstance(answer, RequestRefused):
        raise ExchangeFailed(f"refused: {answer.reason}")
    if not isinstance(answer, expected):
        raise ExchangeFailed(f"{type(answer).__name__} instead of {expected[0].__name__}")
    return answer
