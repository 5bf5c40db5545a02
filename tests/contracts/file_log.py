"""The log in a directory of segment files, as a log of its own: for tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from tests.contracts.memory_log import LocalLog, wall_clock_us
from unicrond.events.log.event_log import LogDamaged
from unicrond.events.log.segment_writer import SEGMENT_BYTES, SegmentWriter
from unicrond.events.log.segments import read_segment
from unicrond.events.log.skips import skips_in_files
from unicrond.events.wire.envelope import Entry


class FileLog(LocalLog):
    """An EventLog in a directory. Opening it reads all of it once (ids, terms, completeness)."""

    def __init__(
        self, directory: Path, *, clock: Callable[[], int] = wall_clock_us, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        super().__init__(clock)
        self._directory = directory
        self._writer = SegmentWriter(directory, segment_bytes=segment_bytes)
        try:
            self._writer.repair()
            for path in self._writer.segments:
                for batch in read_segment(path):
                    for entry in batch.entries:
                        self._take_in(entry)
        except BaseException:
            self._writer.close()
            raise

    async def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        """Yield entries (EventLog.read). Raises LogDamaged where a segment is broken."""
        seq = after_seq
        segment, at_bytes = self._segment_of(seq + 1), 0
        while until_seq is None or seq < until_seq:
            while seq >= self._last_seq:
                await self._new_entries.wait()
            had_bytes = at_bytes
            for batch in read_segment(self._writer.segments[segment], at_bytes):
                at_bytes = batch.end_bytes
                for entry in batch.entries:
                    if entry.seq > seq:
                        seq = entry.seq
                        yield entry
                    if seq == until_seq:
                        return
            if at_bytes == had_bytes:
                segment, at_bytes = segment + 1, 0
                if segment == len(self._writer.segments):
                    raise LogDamaged(f"{self._directory}: entries after {seq} are missing from the files")

    async def skips(self) -> dict[int, str]:
        """Read the skips from the files, each time anew (EventLog.skips)."""
        return skips_in_files(self._writer.segments)

    async def close(self) -> None:
        """Close the files (EventLog.close)."""
        self._writer.close()

    def _store(self, entries: Sequence[Entry]) -> None:
        self._writer.write(entries)

    def _take_in(self, entry: Entry) -> None:
        try:
            super()._take_in(entry)
        except LogDamaged as error:
            raise LogDamaged(f"{self._directory}: {error}") from None

    def _segment_of(self, seq: int) -> int:
        """Return the index of the segment that holds `seq`, or will hold it."""
        return max((number for number, path in enumerate(self._writer.segments) if int(path.stem) <= seq), default=0)
