"""A log whose older part stands in files: the stream was trimmed, the archive (`archive.py`) has the rest.

Rules
-----
* Reading gives the archive first, then the stream; one order, no gap, as if it had never been split.
* The archive must be this log's: the newest entry in it is compared with the stream's, while it has it.
* An unfinished frame at the archive's end was not yet trusted to it: the stream still has those entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

from unicrond.events.log.event_log import EventLog, Fence, LogDamaged
from unicrond.events.log.segments import TornTail, read_segment, segment_paths
from unicrond.events.log.skips import skips_in_files
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent


class ArchivedLog:
    """An EventLog: first what `directory` holds (nothing, where it does not exist), then `log`."""

    def __init__(self, log: EventLog, directory: Path) -> None:
        self._log = log
        self._directory = directory
        self._archive_is_ours = False

    async def append(self, envelopes: Sequence[Envelope], *, fence: Fence | None = None) -> list[int]:
        """Append to the stream, which alone takes new entries (EventLog.append)."""
        return await self._log.append(envelopes, fence=fence)

    async def claim_term(self, envelope: Envelope) -> Fence:
        """Claim a term in the stream (EventLog.claim_term)."""
        return await self._log.claim_term(envelope)

    async def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        """Yield the entries of the archive, then those of the stream (EventLog.read). Raises LogDamaged where the two
        do not belong together."""
        seq = after_seq
        if not self._archive_is_ours:
            await self._compare_with_stream()
        for batch in archived_batches(self._directory, after_seq):
            for entry in batch:
                if seq == until_seq:
                    return
                if entry.seq > seq:
                    seq = entry.seq
                    yield entry
            await asyncio.sleep(0)  # files never wait by themselves
        async with aclosing(self._log.read(seq, until_seq=until_seq)) as entries:
            async for entry in entries:
                yield entry

    async def skips(self) -> dict[int, str]:
        """Return the skips of the archive and of the stream (EventLog.skips)."""
        archived = segment_paths(self._directory) if self._directory.is_dir() else []
        return skips_in_files(archived) | await self._log.skips()

    async def last_seq(self) -> int:
        """Return the stream's last sequence number (EventLog.last_seq)."""
        return await self._log.last_seq()

    async def close(self) -> None:
        """Close the stream's log (EventLog.close)."""
        await self._log.close()

    async def _compare_with_stream(self) -> None:
        """Raise LogDamaged where the archive belongs to another log."""
        newest = newest_archived(self._directory)
        if newest is not None:
            await require_same(self._log, newest, self._directory)
        self._archive_is_ours = True


def archived_batches(directory: Path, after_seq: int = 0) -> Iterator[list[Entry]]:
    """Yield the archive's entries in batches; the first may begin before `after_seq` + 1. Raises LogDamaged."""
    segments = segment_paths(directory) if directory.is_dir() else []
    seq = 0
    for number, segment in enumerate(segments):
        if number + 1 < len(segments) and int(segments[number + 1].stem) <= after_seq + 1:
            continue
        try:
            for batch in read_segment(segment):
                for entry in batch.entries:
                    if seq and entry.seq != seq + 1:
                        raise LogDamaged(f"{segment}: entry {entry.seq} follows entry {seq}")
                    seq = entry.seq
                if batch.entries:
                    yield batch.entries
        except TornTail:
            if number + 1 < len(segments):
                raise


def archived_beats(directory: Path) -> Iterator[list[RecordedEvent]]:
    """Yield the heartbeats that the archive keeps (`heartbeat_evidence.py`), in pieces. Raises LogDamaged."""
    segments = segment_paths(directory) if directory.is_dir() else []
    for number, segment in enumerate(segments):
        try:
            for batch in read_segment(segment):
                if batch.beats:
                    yield list(batch.beats)
        except TornTail:
            if number + 1 < len(segments):
                raise


def newest_archived(directory: Path) -> Entry | None:
    """Return the last entry in the archive, None for an empty one. Raises LogDamaged."""
    newest: Entry | None = None
    for batch in archived_batches(directory, 2**62):
        newest = batch[-1]
    if newest is None and len(segment_paths(directory) if directory.is_dir() else []) > 1:
        # The last segment was begun and nothing came of it.
        for batch in archived_batches(directory):
            newest = batch[-1]
    return newest


async def require_same(log: EventLog, archived: Entry, directory: Path) -> None:
    """Raise LogDamaged if `log` has another entry under the number of `archived`."""
    if await log.last_seq() < archived.seq:
        raise LogDamaged(
            f"{directory}: ends with entry {archived.seq}, beyond the log's end: this is another log's archive"
        )
    try:
        async with aclosing(log.read(archived.seq - 1, until_seq=archived.seq)) as entries:
            async for entry in entries:
                if repr(entry) != repr(archived):  # by repr: a loss may be NaN
                    raise LogDamaged(
                        f"{directory}: entry {archived.seq} is not the log's: this is another log's archive"
                    )
    except LogDamaged as error:
        if "is not the log's" in str(error):
            raise
        # The stream has it no more: it begins later.
