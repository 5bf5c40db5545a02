"""Sources of entries: the protocol of all of them, and the source that is a file (NATS: `nats_source.py`).

Rules
-----
* A source is a log as it is when it is opened; later entries are not read, and nothing is ever written.
* An unfinished frame at the end of a file was never acknowledged: it is left out, with a warning. Any other
  damage is LogDamaged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from unicrond.events.log.event_log import LogDamaged
from unicrond.events.log.point import Point
from unicrond.events.log.segments import TornTail, has_end_mark, read_segment, segment_paths
from unicrond.events.log.skips import apply_skips, skips_in_files
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.service.api.redaction import Discretion, redact

logger = logging.getLogger(__name__)

#: The masking of whatever this command prints: the values that entries hold are learnt as they are read, in one place,
#: so that a value is printed only after the entry that holds it was read.
REDACTOR = Discretion()
#: About so many entries are read before the event loop runs other tasks.
CHUNK_ENTRIES = 500


class LogChunk(NamedTuple):
    """Consecutive entries, and how much of the whole log has been read with them (0 to 1)."""

    entries: list[Entry]
    fraction: float


class Source(Protocol):
    """A log that can be read from any entry to its end.

    `has_own_times`: the entries carry the times at which they were first recorded; an imported log's on NATS do not.
    """

    @property
    def has_own_times(self) -> bool:
        """Return whether the recorded times are those of the log itself."""
        ...

    def chunks(self, after_seq: int = 0) -> AsyncGenerator[LogChunk, None]:
        """Yield all entries after `after_seq`, in order. Raises LogError. Close it where the reader stops early."""
        ...

    async def skips(self) -> dict[int, str]:
        """Return the entries that are passed over, with the reason of each (events/log/skips.py)."""
        ...

    async def end_us(self) -> int:
        """Return when the newest entry was recorded, 0 for an empty log."""
        ...

    def beats(self) -> AsyncGenerator[list[RecordedEvent], None]:
        """Yield the retained heartbeats, in pieces; one may come twice (`events/log/heartbeat_evidence.py`)."""
        ...


async def read(
    source: Source, *, after: Point | None = None, until: Point | None = None
) -> AsyncGenerator[LogChunk, None]:
    """Yield the chunks of `source`, cut to the entries that `after` does not cover and `until` does."""
    after_seq = getattr(after, "seq", 0)
    is_inside = after is None
    async with aclosing(_folded_chunks(source, after_seq)) as chunks:
        async for entries, fraction in chunks:
            if after is not None and not is_inside:
                first = next((number for number, entry in enumerate(entries) if not after.covers(entry)), None)
                if first is None:
                    continue
                is_inside, entries = True, entries[first:]
            if until is not None:
                last = next((number for number, entry in enumerate(entries) if not until.covers(entry)), None)
                if last is not None:
                    yield LogChunk(entries[:last], 1.0)
                    return
            yield LogChunk(entries, fraction)


async def entries_of(source: Source) -> AsyncGenerator[Entry, None]:
    """Yield the entries of `source` one by one. Close it where the reader stops early."""
    async with aclosing(_folded_chunks(source, 0)) as chunks:
        async for chunk in chunks:
            for entry in chunk.entries:
                yield entry


async def _folded_chunks(source: Source, after_seq: int) -> AsyncGenerator[LogChunk, None]:
    """Yield the chunks as they are to be folded: without what is skipped anywhere in the log."""
    skips = await source.skips()
    async with aclosing(source.chunks(after_seq)) as chunks:
        async for chunk in chunks:
            for entry in chunk.entries:
                REDACTOR.see(entry)
            yield LogChunk([apply_skips(entry, skips) for entry in chunk.entries], chunk.fraction) if skips else chunk


class FileSource:
    """An exported log: one segment file, or a directory of them. Raises FileNotFoundError, LogDamaged."""

    has_own_times = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._segments = segment_paths(path)
        if not self._segments:
            raise LogDamaged(f"{path}: this directory holds no segment of a log (a file like {1:020d}.log)")
        if path.is_file() and not has_end_mark(path):
            logger.warning("%s has no end mark, as older exports have none: it may have been cut", path)
        self._size_bytes = sum(segment.stat().st_size for segment in self._segments)

    async def chunks(self, after_seq: int = 0) -> AsyncGenerator[LogChunk, None]:
        """Yield the entries; see Source. Raises LogDamaged."""
        async with aclosing(self._read(self._segments)) as chunks:
            async for entries, fraction in chunks:
                if entries[-1].seq > after_seq:
                    fresh = entries if entries[0].seq > after_seq else entries[after_seq - entries[0].seq + 1 :]
                    yield LogChunk(fresh, fraction)

    async def skips(self) -> dict[int, str]:
        """Return the skipped entries; see Source."""
        return skips_in_files(self._segments)

    async def end_us(self) -> int:
        """Read backwards until a segment has an entry, and return its time; see Source."""
        newest = 0
        # A crash may have left the last segment without an entry; then the one before it has the newest.
        for number in reversed(range(len(self._segments))):
            async with aclosing(self._read(self._segments[number:])) as chunks:
                async for entries, _ in chunks:
                    newest = entries[-1].recorded_at_us
            if newest:
                break
        return newest

    async def beats(self) -> AsyncGenerator[list[RecordedEvent], None]:
        """Yield the heartbeats up to an incomplete end of a segment; see Source."""
        for segment in self._segments:
            try:
                for batch in read_segment(segment):
                    if batch.beats:
                        yield list(batch.beats)
                    await asyncio.sleep(0)
            except TornTail:
                return  # reading the entries has reported it

    async def _read(self, segments: Sequence[Path]) -> AsyncGenerator[LogChunk, None]:
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
                    yield LogChunk(batch.entries, (before_bytes + batch.end_bytes) / self._size_bytes)
                    in_turn += len(batch.entries)
                    if in_turn >= CHUNK_ENTRIES:
                        in_turn = 0
                        await asyncio.sleep(0)  # reading never waits by itself, and Ctrl-C must be handled
            except TornTail as error:
                if segment != self._segments[-1] or (error.whole_bytes == 0 and len(self._segments) == 1):
                    raise
                logger.warning("%s; that write was never acknowledged and is left out", error)
            before_bytes += segment.stat().st_size


def mask_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Mask secrets in entries that are to be passed on; texts keep their length, everything else is unchanged."""
    return [_masked(entry) if isinstance(entry, RecordedEvent) else entry for entry in entries]


def _masked(entry: RecordedEvent) -> RecordedEvent:
    mask = REDACTOR.mask()
    plain = msgspec.to_builtins(entry.envelope)
    masked_plain = redact(plain, lambda text: mask.overwrite(text.encode()).decode())
    envelope = entry.envelope if masked_plain == plain else msgspec.convert(masked_plain, Envelope, strict=True)
    return RecordedEvent(entry.seq, entry.recorded_at_us, envelope)
