"""The log in memory: for tests. Nothing survives the process."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

from unicrond.events.log.event_log import Fence, Fenced, LogDamaged, claimed_term, encode_batch, is_in_feed
from unicrond.events.log.skips import skips_in
from unicrond.events.vocabulary import CoordinatorStarted, Heartbeat
from unicrond.events.wire.codec import decode, encode
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent


def wall_clock_us() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


class LocalLog(ABC):
    """The base of every EventLog without a server: it numbers the entries, and knows the ids and the newest claim."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """Create an empty log. `clock`: the receive time in microseconds since the epoch."""
        self._clock = clock
        self._last_seq = 0
        self._seq_by_id: dict[str, int] = {}
        self._fence = Fence(0, 0)
        self._claim: Envelope | None = None
        self._new_entries = asyncio.Event()

    async def append(self, envelopes: Sequence[Envelope], *, fence: Fence | None = None) -> list[int]:
        """Append a batch (EventLog.append)."""
        bodies = encode_batch(envelopes)
        # Decoded anew, so that readers see exactly what a log on the wire would give them.
        seq_by_id = self._seq_by_id
        fresh = [
            decode(body) for envelope, body in zip(envelopes, bodies, strict=True) if envelope.event_id not in seq_by_id
        ]
        if fresh and fence is not None and fence != self._fence:
            raise Fenced(f"term {fence.term} was replaced by term {self._fence.term}")
        if fresh:
            self._write(fresh)
        return [seq_by_id[envelope.event_id] for envelope in envelopes]

    async def claim_term(self, envelope: Envelope) -> Fence:
        """Claim a term (EventLog.claim_term)."""
        term = claimed_term(envelope)
        if envelope != self._claim:
            if term <= self._fence.term and self._fence.seq > envelope.based_on:
                raise Fenced(f"term {term} is not above term {self._fence.term}")
            self._write([envelope])
        return self._fence

    async def last_seq(self) -> int:
        """Return the newest entry's sequence number (EventLog.last_seq)."""
        return self._last_seq

    @abstractmethod
    def _store(self, entries: Sequence[Entry]) -> None:
        """Store the entries, all or none."""

    def _write(self, envelopes: Sequence[Envelope]) -> None:
        now_us = self._clock()
        self._keep([RecordedEvent(seq, now_us, envelope) for seq, envelope in enumerate(envelopes, self._last_seq + 1)])

    def _keep(self, entries: Sequence[Entry]) -> None:
        self._store(entries)
        for entry in entries:
            self._take_in(entry)
        self._new_entries.set()  # wakes all readers at the end; later ones wait on a fresh event
        self._new_entries = asyncio.Event()

    def _take_in(self, entry: Entry) -> None:
        """Register a stored entry. Raises LogDamaged where it is not the next one."""
        if entry.seq != self._last_seq + 1:
            raise LogDamaged(f"entry {entry.seq} follows entry {self._last_seq}")
        self._last_seq = entry.seq
        if isinstance(entry, RecordedEvent):
            self._seq_by_id.setdefault(entry.envelope.event_id, entry.seq)
            if isinstance(entry.envelope.event, CoordinatorStarted):
                self._fence, self._claim = Fence(entry.envelope.event.term, entry.seq), entry.envelope


class MemoryLog(LocalLog):
    """An EventLog."""

    def __init__(self, clock: Callable[[], int] = wall_clock_us) -> None:
        super().__init__(clock)
        self._entries: list[Entry] = []

    async def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        """Yield entries (EventLog.read)."""
        seq = after_seq
        while until_seq is None or seq < until_seq:
            if seq < len(self._entries):
                seq += 1
                yield self._entries[seq - 1]
            else:
                await self._new_entries.wait()

    async def skips(self) -> dict[int, str]:
        """Return the skips among the entries (EventLog.skips)."""
        return skips_in(self._entries)

    async def close(self) -> None:
        """Do nothing: a log in memory holds nothing to release."""

    def _store(self, entries: Sequence[Entry]) -> None:
        self._entries += entries


class MemoryBeatLog:
    """A BeatLog."""

    def __init__(self, clock: Callable[[], int] = wall_clock_us) -> None:
        self._clock = clock
        self._seq = 0
        self._subscribers: set[asyncio.Queue[RecordedEvent]] = set()

    async def publish(self, envelope: Envelope) -> None:
        """Publish a beat (BeatLog.publish). Raises TypeError on anything but a Heartbeat, BadEvent on an invalid
        one."""
        if not isinstance(envelope.event, Heartbeat):
            raise TypeError(f"envelope.event: expected a Heartbeat, got {type(envelope.event).__name__}")
        encode(envelope)
        self._seq += 1
        beat = RecordedEvent(self._seq, self._clock(), envelope)
        for queue in self._subscribers:
            queue.put_nowait(beat)

    async def subscribe(self) -> AsyncGenerator[Entry, None]:
        """Yield beats from now on (BeatLog.subscribe)."""
        queue: asyncio.Queue[RecordedEvent] = asyncio.Queue()
        self._subscribers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._subscribers.discard(queue)


class MemoryCommandFeed:
    """A CommandFeed over a MemoryLog; the object remembers which entries were acknowledged and which tasks are
    followed."""

    def __init__(self, log: MemoryLog, node: str) -> None:
        self._log = log
        self._node = node
        self._tasks: frozenset[str] = frozenset()
        self._acked_seq = 0

    async def follow(self, tasks: Collection[str]) -> None:
        """Set the tasks to follow (CommandFeed.follow)."""
        self._tasks = frozenset(tasks)

    async def read(self) -> AsyncGenerator[RecordedEvent, None]:
        """Yield commands and broadcasts (CommandFeed.read)."""
        async for entry in self._log.read(self._acked_seq):
            if isinstance(entry, RecordedEvent) and is_in_feed(entry.envelope.event, self._node, self._tasks):
                yield entry
            self._acked_seq = entry.seq
