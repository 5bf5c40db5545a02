"""Serves states to other nodes' agents and workers, and stores copies of theirs (protocol/memory_exchange.py).

A thread for each connection, so that no transfer holds up the agent; the bytes go straight between the socket and the
shared memory. One request each, no wait without a bound. A copy is accepted when its digest is right, and is sealed
only then.

A requester that has not sent the token or its pass yet is a stranger. Strangers take no place from known peers: at most
`CONNECTIONS_MAX` requests are served at a time, `PEER_MAX` of one peer, and of `STRANGERS_MAX` strangers the oldest is
broken off for the next. A stranger has `REQUEST_TIMEOUT_S` for its handshake, and as long for its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from unicrond.agents.memory.regions import MemoryRegions, NoRegion
from unicrond.agents.protocol.memory import Memory, TooLarge
from unicrond.agents.protocol.memory_exchange import (
    SILENCE_TIMEOUT_S,
    Ask,
    BadPass,
    CopyStored,
    ExchangeFailed,
    Fetch,
    FetchAnswer,
    HeadOf,
    HeldShard,
    HoldingsAnswer,
    Push,
    PushAccepted,
    Request,
    RequestRefused,
    receive_into,
    receive_message,
    send,
    send_message,
)
from unicrond.events.vocabulary import Name, SnapshotStored

if TYPE_CHECKING:
    from unicrond.agents.memory.peer_tokens import Credentials  # needs an extra

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 32
STRANGERS_MAX = 64
#: How many requests of one node (in clear: one address) are served at a time: its workers all ask at once.
PEER_MAX = 16
#: A requester sends its request at once: it is one small frame.
REQUEST_TIMEOUT_S = 2.0
#: How long a request waits to be served. The requester waits longer for its answer.
TURN_TIMEOUT_S = SILENCE_TIMEOUT_S / 2
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


class _Refusal(Exception):
    """The request is refused; the text is sent instead of an answer."""


class _Peer(NamedTuple):
    """The requesting node. `name`: with TLS the node's name, without it the address. `generation`: with TLS that of its
    warrant, without it None."""

    name: str
    generation: int | None = None


class MemoryServer:
    """Serves `regions` of `node` after `start`. `on_copy` is called in the event loop when a copy is sealed.
    `credentials`: those
    of this node, for TLS and passes; None: in clear, with the token."""

    def __init__(
        self,
        node: Name,
        regions: MemoryRegions,
        token: str,
        on_copy: Callable[[SnapshotStored], None],
        credentials: Credentials | None = None,
    ) -> None:
        self._node = node
        self._regions = regions
        self._token = token
        self._on_copy = on_copy
        self._credentials = credentials
        self._places = RequestSlots(CONNECTIONS_MAX, PEER_MAX)
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = 0

    def start(self, address: str, port: int) -> None:
        """Listen on `port`, or on any free port where it is in use. Call it in the event loop. Raise OSError."""
        self._loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            try:
                listener.bind((address, port))
            except OSError:
                listener.bind((address, 0))
            listener.listen(STRANGERS_MAX)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self.port = listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), name="memory", daemon=True).start()

    def close(self) -> None:
        """Stop listening and break off the transfers that are under way."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            for connection in self._connections:
                _break_off(connection)

    # --- the threads -----------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            self._make_room()
            with self._lock:
                self._connections.add(connection)
                self._strangers[connection] = None
            threading.Thread(target=self._serve, args=(connection,), name="memory-peer", daemon=True).start()

    def _make_room(self) -> None:
        """Shut the oldest stranger out where there are too many."""
        with self._lock:
            if len(self._strangers) >= STRANGERS_MAX:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _break_off(oldest)

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(REQUEST_TIMEOUT_S)
            connection = self._in_tls(connection)
            with connection:
                request = receive_message(connection, _requests)
                connection.settimeout(SILENCE_TIMEOUT_S)
                try:
                    peer = self._admitted(connection, request)
                    self._no_stranger(connection)
                    self._answer_in_turn(connection, request, peer)
                except _Refusal as refusal:
                    send_message(connection, RequestRefused(reason=str(refusal)[:1024]))
        except (ExchangeFailed, OSError) as error:
            logger.info("a request for a state was cut off: %s", error)
        except Exception:
            logger.exception("a request for a state failed")
        finally:
            self._no_stranger(connection)
            with self._lock:
                self._connections.discard(connection)

    def _in_tls(self, plain: socket.socket) -> socket.socket:
        """Return the connection wrapped in TLS, where this node has a certificate. Raise OSError."""
        if self._credentials is None:
            return plain
        context = self._credentials.context()
        with self._lock:
            self._strangers.pop(plain, None)
            self._connections.discard(plain)
            try:
                connection = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            except OSError:
                plain.close()
                raise
            self._connections.add(connection)
            self._strangers[connection] = None
        try:
            connection.do_handshake()
        except OSError:
            self._no_stranger(connection)
            with self._lock:
                self._connections.discard(connection)
            connection.close()
            raise
        return connection

    def _admitted(self, connection: socket.socket, request: Request) -> _Peer:
        """Return the requesting peer. Raise _Refusal where it may not ask."""
        if self._credentials is None:
            if not hmac.compare_digest(request.token.encode(), self._token.encode()):
                raise _Refusal("the token is not this node's")
            return _Peer(str(connection.getpeername()[0]))
        try:
            node, generation = self._credentials.admit(request.token, request.task)
        except BadPass as error:
            raise _Refusal(str(error)) from None
        if isinstance(request, Push):
            if request.origin != node:
                raise _Refusal(f"node {node} brings a state of node {request.origin}")
            if request.head.generation > generation:
                raise _Refusal(f"generation {request.head.generation} is later than its warrant's, {generation}")
        return _Peer(node, generation)

    def _no_stranger(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    def _answer_in_turn(self, connection: socket.socket, request: Request, peer: _Peer) -> None:
        if not self._places.take(peer.name, TURN_TIMEOUT_S):
            raise _Refusal(f"already serving {CONNECTIONS_MAX} other requests, or {PEER_MAX} of {peer.name}")
        try:
            self._answer(connection, request, peer)
        finally:
            self._places.leave(peer.name)

    def _answer(self, connection: socket.socket, request: Request, peer: _Peer) -> None:
        opened = self._opened(request)
        try:
            _require_current(peer, opened)
            match request:
                case Ask():
                    send_message(
                        connection,
                        HoldingsAnswer(shards=tuple(_held_shard(shard, memory) for shard, memory in opened.items())),
                    )
                case Fetch():
                    self._give(connection, opened[request.shard], request)
                case Push():
                    self._take(connection, opened[request.shard], request)
        finally:
            for memory in opened.values():
                memory.close()

    def _opened(self, request: Request) -> dict[int, Memory]:
        """Return the memory that the request is about, by shard."""
        assert self._loop is not None

        async def reach() -> dict[int, Memory]:
            match request:
                case Ask():
                    return self._regions.of_task(request.task)
                case Fetch():
                    return {request.shard: self._regions.open(request.task, request.shard)}
                case Push():
                    return {request.shard: await self._regions.make(request.task, request.shard)}

        try:
            return asyncio.run_coroutine_threadsafe(reach(), self._loop).result(SILENCE_TIMEOUT_S)
        except NoRegion as error:
            raise _Refusal(str(error)) from None
        except (TimeoutError, RuntimeError):
            raise _Refusal("the agent is ending") from None

    def _give(self, connection: socket.socket, memory: Memory, request: Fetch) -> None:
        with memory.reading(request.iteration, request.layout) as reading:
            if reading is None:
                raise _Refusal(f"iteration {request.iteration} is not in memory, or is being overwritten")
            head, view = reading
            send_message(connection, FetchAnswer(head=HeadOf.of(head)))
            send(connection, view)

    def _take(self, connection: socket.socket, memory: Memory, push: Push) -> None:
        started, head = time.monotonic(), push.head.head()
        newest = memory.newest()
        if newest is not None and (newest.generation, newest.iteration) >= (head.generation, head.iteration):
            send_message(
                connection, CopyStored()
            )  # this state or a newer one is there already: several nodes may bring the same state
            return
        try:
            draft = memory.draft(head.size_bytes)
        except TooLarge as error:
            raise _Refusal(str(error)) from None
        if draft is None:
            raise _Refusal("another request is writing or reading the memory")
        try:
            send_message(connection, PushAccepted())
            digest = receive_into(connection, draft.view)
            draft.seal(head.iteration, head.generation, head.digest, head.layout, digest)
        except ValueError as error:
            raise _Refusal(str(error)) from None
        finally:
            draft.abandon()
        send_message(connection, CopyStored())
        copy = SnapshotStored(
            node=self._node,
            task=push.task,
            shard=push.shard,
            iteration=head.iteration,
            generation=head.generation,
            origin=push.origin,
            size_bytes=head.size_bytes,
            shards=head.layout.workers,
            duration_us=int((time.monotonic() - started) * 1e6),
        )
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._on_copy, copy)


class RequestSlots:
    """Bounds how many requests are served at a time, in all and for one peer."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._served: Counter[str] = Counter()
        self._changed = threading.Condition()

    def take(self, peer: str, timeout_s: float) -> bool:
        """Wait for a free place; return whether there was one in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_free(peer), timeout_s):
                return False
            self._served[peer] += 1
            return True

    def leave(self, peer: str) -> None:
        """Give a place back."""
        with self._changed:
            self._served[peer] -= 1
            self._served += Counter()  # without those that have none
            self._changed.notify_all()

    def _is_free(self, peer: str) -> bool:
        return self._served.total() < self._most and self._served[peer] < self._most_of_one


def _require_current(peer: _Peer, opened: Mapping[int, Memory]) -> None:
    """Raise _Refusal where the peer has left the task: it gets nothing of what was trained without it, and brings
    nothing."""
    if peer.generation is None:
        return
    newest = max((head.generation for memory in opened.values() for head in memory.heads()), default=0)
    if newest > peer.generation:
        raise _Refusal(f"node {peer.name} has a warrant of generation {peer.generation}, here is one of {newest}")


def _break_off(connection: socket.socket) -> None:
    """Shut the connection down, whatever its thread does with it. TLS's own end is for that thread alone."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _held_shard(shard: int, memory: Memory) -> HeldShard:
    return HeldShard(shard=shard, heads=tuple(HeadOf.of(head) for head in memory.heads()))
