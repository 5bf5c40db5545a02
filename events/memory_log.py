"""The log in memory: for tests and for simulation. Nothing survives the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from events.codec import decode, encode
from events.envelope import Entry, Envelope, Recorded
from events.log import Fence, Fenced, claimed_term, encode_batch
from events.skips import skips_in
from events.vocabulary import Command, Heartbeat


def wall_clock_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000


class MemoryLog:
    """An EventLog. `clock`: the receive time in microseconds; a simulator passes its own."""

    def __init__(self, clock: Callable[[], int] = wall_clock_us) -> None:
        self._clock = clock
        self._entries: list[Entry] = []
        self._seq_by_id: dict[str, int] = {}
        self._fence = Fence(0, 0)
        self._claim: Envelope | None = None
        self._grown = asyncio.Event()

    async def append(self, envelopes: Sequence[Envelope], *, fence: Fence | None = None) -> list[int]:
        bodies = encode_batch(envelopes)
        fresh = [body for envelope, body in zip(envelopes, bodies, strict=True) if not self._knows(envelope)]
        if fresh and fence is not None and fence != self._fence:
            raise Fenced(f"term {fence.term} was replaced by term {self._fence.term}")
        for body in fresh:
            # Decoded anew, so that readers see exactly what a log on the wire would give them.
            self._write(decode(body))
        self._announce()
        return [self._seq_by_id[envelope.event_id] for envelope in envelopes]

    async def claim_term(self, envelope: Envelope) -> Fence:
        term = claimed_term(envelope)
        if envelope == self._claim:
            return self._fence
        if term <= self._fence.term and self._fence.seq > envelope.based_on:
            raise Fenced(f"term {term} is not above term {self._fence.term}")
        self._fence, self._claim = Fence(term, self._write(envelope)), envelope
        self._announce()
        return self._fence

    async def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        seq = after_seq
        while until_seq is None or seq < until_seq:
            if seq < len(self._entries):
                seq += 1
                yield self._entries[seq - 1]
            else:
                await self._grown.wait()

    async def skips(self) -> dict[int, str]:
        return skips_in(self._entries)

    async def last_seq(self) -> int:
        return len(self._entries)

    async def close(self) -> None:
        """Nothing to release."""

    def _knows(self, envelope: Envelope) -> bool:
        return envelope.event_id in self._seq_by_id

    def _write(self, envelope: Envelope) -> int:
        seq = len(self._entries) + 1
        self._entries.append(Recorded(seq, self._clock(), envelope))
        self._seq_by_id[envelope.event_id] = seq
        return seq

    def _announce(self) -> None:
        """Wake all who wait at the tail; the next ones wait on a fresh event."""
        self._grown.set()
        self._grown = asyncio.Event()


class MemoryBeatLog:
    """A BeatLog."""

    def __init__(self, clock: Callable[[], int] = wall_clock_us) -> None:
        self._clock = clock
        self._seq = 0
        self._subscribers: set[asyncio.Queue[Recorded]] = set()

    async def publish(self, envelope: Envelope) -> None:
        if not isinstance(envelope.event, Heartbeat):
            raise TypeError(f"envelope.event: expected a Heartbeat, got {type(envelope.event).__name__}")
        encode(envelope)
        self._seq += 1
        beat = Recorded(self._seq, self._clock(), envelope)
        for queue in self._subscribers:
            queue.put_nowait(beat)

    async def subscribe(self) -> AsyncGenerator[Entry, None]:
        queue: asyncio.Queue[Recorded] = asyncio.Queue()
        self._subscribers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)


class MemoryCommandFeed:
    """A CommandFeed over a MemoryLog; the object remembers what was acknowledged."""

    def __init__(self, log: MemoryLog, node: str) -> None:
        self._log = log
        self._node = node
        self._acked_seq = 0

    async def read(self) -> AsyncGenerator[Recorded, None]:
        async for entry in self._log.read(self._acked_seq):
            if isinstance(entry, Recorded) and isinstance(entry.envelope.event, Command):
                if entry.envelope.event.node != self._node:
                    continue
                yield entry
            self._acked_seq = entry.seq
