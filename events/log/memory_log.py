"""The log in memory: for tests and for simulation. Nothing survives the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

from unicrond.events.log.event_log import LocalLog, is_in_feed
from unicrond.events.log.skips import skips_in
from unicrond.events.vocabulary import Heartbeat
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent


def wall_clock_us() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


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
