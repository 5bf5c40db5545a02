"""Where other nodes' agents and workers ask for states, and bring copies of theirs (protocol/memory_exchange.py).

A thread for each connection, so that no transfer holds up the agent; the bytes go straight between the socket and the
shared memory. One request each, no wait without a bound. A copy is believed when its digest is right, and is sealed
only then.

A requester that has not named the token yet is a stranger. Strangers take no other's place: at most `CONNECTIONS_MAX`
requests are served at a time, and of `STRANGERS_MAX` strangers the oldest has to leave for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from agents.memory_regions import MemoryRegions, NoRegion
from agents.protocol.memory import Memory, TooLarge
from agents.protocol.memory_exchange import (
    SILENCE_TIMEOUT_S,
    Accepted,
    Ask,
    Fetch,
    Fetched,
    HeadOf,
    HeldShard,
    Holds,
    NoAnswer,
    Push,
    Refused,
    Request,
    Stored,
    hear,
    read_into,
    say,
    send,
)
from agents.state import Held

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 16
STRANGERS_MAX = 64
#: A requester says at once what it wants: its request is one small frame.
REQUEST_TIMEOUT_S = 2.0
#: For a place among the served. The requester waits longer for its answer.
TURN_TIMEOUT_S = SILENCE_TIMEOUT_S / 2
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


class _Refusal(Exception):
    """What is said instead of an answer."""


class MemoryServer:
    """Serves `regions` from `start` on. `on_copy` is called in the event loop when a copy is sealed."""

    def __init__(self, regions: MemoryRegions, token: str, on_copy: Callable[[Held], None]) -> None:
        self._regions = regions
        self._token = token
        self._on_copy = on_copy
        self._free = threading.Semaphore(CONNECTIONS_MAX)
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = 0

    def start(self, address: str, port: int) -> None:
        """Listen on `port`, or on any where it is taken. Call it in the event loop. Raises OSError."""
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
        """Stop listening and break off what is under way."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

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
        """Break off the oldest stranger where there are too many."""
        with self._lock:
            if len(self._strangers) >= STRANGERS_MAX:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(REQUEST_TIMEOUT_S)
                request = hear(connection, _requests)
                connection.settimeout(SILENCE_TIMEOUT_S)
                try:
                    if not hmac.compare_digest(request.token.encode(), self._token.encode()):
                        raise _Refusal("the token is not this node's")
                    self._no_stranger(connection)
                    self._answer_in_turn(connection, request)
                except _Refusal as refusal:
                    say(connection, Refused(reason=str(refusal)[:1024]))
        except (NoAnswer, OSError) as error:
            logger.info("a request for a state was cut off: %s", error)
        except Exception:
            logger.exception("a request for a state failed")
        finally:
            self._no_stranger(connection)
            with self._lock:
                self._connections.discard(connection)

    def _no_stranger(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    def _answer_in_turn(self, connection: socket.socket, request: Request) -> None:
        if not self._free.acquire(timeout=TURN_TIMEOUT_S):
            raise _Refusal(f"already serving {CONNECTIONS_MAX} other requests")
        try:
            self._answer(connection, request)
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket, request: Request) -> None:
        opened = self._opened(request)
        try:
            match request:
                case Ask():
                    say(connection, Holds(shards=tuple(_told(shard, memory) for shard, memory in opened.items())))
                case Fetch():
                    self._give(connection, opened[request.shard], request)
                case Push():
                    self._take(connection, opened[request.shard], request)
        finally:
            for memory in opened.values():
                memory.close()

    def _opened(self, request: Request) -> dict[int, Memory]:
        """The memory that is asked about, by shard."""
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

    def _give(self, connection: socket.socket, memory: Memory, wanted: Fetch) -> None:
        with memory.reading(wanted.iteration, (wanted.tp, wanted.pp)) as found:
            if found is None:
                raise _Refusal(f"iteration {wanted.iteration} is not in memory, or is being overwritten")
            head, view = found
            say(connection, Fetched(head=HeadOf.of(head)))
            send(connection, view)

    def _take(self, connection: socket.socket, memory: Memory, push: Push) -> None:
        started, head = time.monotonic(), push.head.head()
        newest = memory.newest()
        if newest is not None and (newest.generation, newest.iteration) >= (head.generation, head.iteration):
            raise _Refusal(f"iteration {newest.iteration} of generation {newest.generation} is already in memory")
        try:
            draft = memory.draft(head.size_bytes)
        except TooLarge as error:
            raise _Refusal(str(error)) from None
        if draft is None:
            raise _Refusal("another request is writing or reading the memory")
        try:
            say(connection, Accepted())
            read_into(connection, draft.view)
            draft.seal(head.iteration, head.generation, head.digest, head.layout)
        except ValueError as error:
            raise _Refusal(str(error)) from None
        finally:
            draft.abandon()
        say(connection, Stored())
        held = Held(
            task=push.task,
            shard=push.shard,
            iteration=head.iteration,
            generation=head.generation,
            origin=push.origin,
            size_bytes=head.size_bytes,
            shards=head.tp * head.pp,
            duration_us=int((time.monotonic() - started) * 1e6),
        )
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._on_copy, held)


def _told(shard: int, memory: Memory) -> HeldShard:
    return HeldShard(shard=shard, heads=tuple(HeadOf.of(head) for head in memory.heads()))
