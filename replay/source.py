"""Where the entries come from: an exported file, or the event stream of a NATS server. Read-only.

Rules
-----
* A source is a log as it stands when it is opened; what comes later is not read.
* Nothing is created or changed: on NATS only an ephemeral, in-memory consumer that the server drops when we
  leave; no stream, no durable consumer, no message.
* An unfinished frame at the end of a file was never acknowledged: it is left out, with a warning. Any other
  damage is LogDamaged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

from events.envelope import Entry
from events.log import LogDamaged, LogError, LogUnavailable
from events.nats_connection import Connection, Login, connect
from events.nats_log import NatsEventLog
from events.nats_server import EmbeddedServer
from events.nats_streams import ApiError, api
from events.segments import TornTail, read_segment, segment_paths
from events.subjects import EVENT_STREAM
from replay.point import EPOCH, Point

logger = logging.getLogger(__name__)

#: Entries of one chunk from NATS, and how many of a file are read before others get their turn.
CHUNK_ENTRIES = 500
CONNECT_TIMEOUT_S = 5.0
STALL_S = 20.0
STREAM_NOT_FOUND = 10059


class Chunk(NamedTuple):
    """Consecutive entries, and how much of the whole log has been read with them (0 to 1)."""

    entries: list[Entry]
    done: float


class Source(Protocol):
    """A log that can be read from any entry to its end."""

    def chunks(self, after_seq: int = 0) -> AsyncGenerator[Chunk, None]:
        """All entries after `after_seq`, in order. Raises LogError. Close it where it is left early."""
        ...

    async def end_us(self) -> int:
        """When the newest entry was recorded, 0 for an empty log."""
        ...


async def read(
    source: Source, *, after: Point | None = None, until: Point | None = None
) -> AsyncGenerator[Chunk, None]:
    """The chunks of `source` cut to the entries that `after` does not cover and `until` does."""
    after_seq = getattr(after, "seq", 0)
    begun = after is None
    async with aclosing(source.chunks(after_seq)) as chunks:
        async for entries, done in chunks:
            if after is not None and not begun:
                first = next((number for number, entry in enumerate(entries) if not after.covers(entry)), None)
                if first is None:
                    continue
                begun, entries = True, entries[first:]
            if until is not None:
                last = next((number for number, entry in enumerate(entries) if not until.covers(entry)), None)
                if last is not None:
                    yield Chunk(entries[:last], 1.0)
                    return
            yield Chunk(entries, done)


class FileSource:
    """An exported log: one segment file, or a directory of them. FileNotFoundError, LogDamaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._segments = segment_paths(path)
        if not self._segments:
            raise LogDamaged(f"{path}: this directory holds no segment of a log (a file like {1:020d}.log)")
        self._size_bytes = sum(segment.stat().st_size for segment in self._segments)

    async def chunks(self, after_seq: int = 0) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._read(self._segments)) as chunks:
            async for entries, done in chunks:
                if entries[-1].seq > after_seq:
                    fresh = entries if entries[0].seq > after_seq else entries[after_seq - entries[0].seq + 1 :]
                    yield Chunk(fresh, done)

    async def end_us(self) -> int:
        newest = 0
        # A crash may have left the last segment without an entry; then the one before it has the newest.
        for number in reversed(range(len(self._segments))):
            async with aclosing(self._read(self._segments[number:])) as chunks:
                async for entries, _ in chunks:
                    newest = entries[-1].recorded_at_us
            if newest:
                break
        return newest

    async def _read(self, segments: Sequence[Path]) -> AsyncGenerator[Chunk, None]:
        seq = 0
        in_turn = 0
        before_bytes = 0
        for segment in segments:
            try:
                for batch in read_segment(segment):
                    if not batch.entries:
                        continue
                    for entry in batch.entries:
                        if seq and entry.seq != seq + 1:
                            raise LogDamaged(f"{segment}: entry {entry.seq} follows entry {seq}")
                        seq = entry.seq
                    yield Chunk(batch.entries, (before_bytes + batch.end_bytes) / self._size_bytes)
                    in_turn += len(batch.entries)
                    if in_turn >= CHUNK_ENTRIES:
                        in_turn = 0
                        await asyncio.sleep(0)  # reading never waits by itself, and Ctrl-C wants its turn
            except TornTail as torn:
                if segment != self._segments[-1] or (torn.whole_bytes == 0 and len(self._segments) == 1):
                    raise
                logger.warning("%s; that write was never acknowledged and is left out", torn)
            before_bytes += segment.stat().st_size


class NatsSource:
    """The event stream of a NATS server, up to the entry that was the last when it was opened."""

    def __init__(self, connection: Connection, last_seq: int, last_us: int) -> None:
        self._connection = connection
        self._last_seq = last_seq
        self._last_us = last_us

    async def chunks(self, after_seq: int = 0) -> AsyncGenerator[Chunk, None]:
        log = NatsEventLog(self._connection)
        seq = after_seq
        async with aclosing(log.read(after_seq, until_seq=self._last_seq)) as entries:
            while seq < self._last_seq:
                chunk: list[Entry] = []
                try:
                    async with asyncio.timeout(STALL_S):
                        async for entry in entries:
                            chunk.append(entry)
                            if len(chunk) == CHUNK_ENTRIES:
                                break
                except TimeoutError:
                    raise LogUnavailable(
                        f"{self._connection.urls}: only {len(chunk)} entries after entry {seq} of {self._last_seq}"
                        f" in {STALL_S:g} s; is the server up?"
                    ) from None
                seq = chunk[-1].seq
                yield Chunk(chunk, seq / self._last_seq)

    async def end_us(self) -> int:
        return self._last_us


@asynccontextmanager
async def open_nats(urls: Sequence[str], login: Login | None = None) -> AsyncIterator[NatsSource]:
    """The log of a NATS server or cluster. LogError in one line if there is none."""
    connection = await connect(urls, name="unicron-replay", login=login, timeout_s=CONNECT_TIMEOUT_S)
    try:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
        except TimeoutError:
            raise LogUnavailable(
                f"{connection.urls}: JetStream did not answer within {CONNECT_TIMEOUT_S:g} s;"
                " is it enabled there, and may this login read it?"
            ) from None
        except ApiError as error:
            if error.code != STREAM_NOT_FOUND:
                raise
            raise LogError(
                f"{connection.urls}: no stream {EVENT_STREAM} there; is it the coordinator's server?"
            ) from None
        last_seq = int(info["state"]["last_seq"])
        last_us = (datetime.fromisoformat(info["state"]["last_ts"]) - EPOCH) // timedelta(microseconds=1)
        yield NatsSource(connection, last_seq, last_us if last_seq else 0)
    finally:
        await connection.close()


async def embedded_url(state_dir: Path) -> str:
    """The address of the embedded server that runs on a coordinator's state directory. LogUnavailable."""
    server = EmbeddedServer(state_dir / "nats")
    if not await server.adopt():
        raise LogUnavailable(f"{server.directory}: no nats-server runs there; start unicrond, or give --nats URL")
    return server.url
