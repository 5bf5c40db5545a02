"""The writer of a directory of segment files (`segments.py`).

Rules
-----
* One writer per directory (a file lock); a second one gets a LogError at once. Where locks do not hold (two machines on
  one share), a file that has grown by another's hand gets nothing more.
* An append is one frame and one fsync, done in the event loop's own thread (a fraction of a
  millisecond): so it cannot be cancelled half-way, and appends never overlap.
* A torn tail is cut when the log is opened; nothing of it was ever acknowledged. A torn tail anywhere but
  in the last segment is damage.
* After a failed write (disk full) the file is put back to where it was; if even that fails the log takes no more.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from unicrond.events.log.event_log import LogDamaged, LogError, LogUnavailable
from unicrond.events.log.segments import (
    batch_frame,
    beats_frame,
    cut_torn_tail,
    segment_name,
    segment_paths,
    segment_start,
)
from unicrond.events.wire.envelope import Entry, RecordedEvent

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 1024 * 1024
#: Its holder writes to the directory.
LOCK = "lock"


class LogBusy(LogError):
    """Another process, or another object of this one, writes to the directory."""


class SegmentWriter:
    """Appends batches to the segments of one directory. Knows nothing of events but their numbers."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise LogBusy(f"{directory}: another process (or object) writes to this log; close it first") from None
        self._file: int | None = None
        self._size_bytes = 0
        self.segments = segment_paths(directory)

    def repair(self) -> None:
        """Cut the torn tail of the last segment, and continue there."""
        if not self.segments:
            return
        newest = self.segments[-1]
        cut_bytes = cut_torn_tail(newest)
        if cut_bytes:
            logger.warning("%s: cut an unfinished write of %d bytes", newest, cut_bytes)
        if newest.stat().st_size == 0:
            self.segments.pop().unlink()
        if self.segments:
            self._open(self.segments[-1])

    def write(self, entries: Sequence[Entry], *, sync: bool = True, beats: Sequence[RecordedEvent] = ()) -> None:
        """Write one batch atomically; durable if `sync`. LogUnavailable: nothing was written.

        `beats`: heartbeats that go with the batch, before it.
        """
        frame = (beats_frame(beats) if beats else b"") + batch_frame(entries)
        if self._file is None or self._size_bytes + len(frame) > self._segment_bytes:
            self._begin(entries[0].seq)
        assert self._file is not None, "begun"
        if os.fstat(self._file).st_size != self._size_bytes:
            raise LogBusy(f"{self._directory}: another process has written to this log; nothing more is written here")
        try:
            _write_all(self._file, frame)
            if sync:
                os.fsync(self._file)
        except OSError as error:
            self._take_back()
            raise LogUnavailable(f"{self._directory}: not written: {error}") from error
        self._size_bytes += len(frame)

    def close(self) -> None:
        """Make everything durable, and release the directory."""
        file, self._file = self._file, None
        try:
            if file is not None:
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _begin(self, first_seq: int) -> None:
        """Begin a segment whose first entry is `first_seq`."""
        path = self._directory / segment_name(first_seq)
        start = segment_start(first_seq)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_all(file, start)
                os.fsync(file)
            finally:
                os.close(file)
            directory = os.open(self._directory, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise LogUnavailable(f"{path}: cannot begin a segment: {error}") from error
        if self._file is not None:
            os.fsync(self._file)
        self._open(path)
        if path not in self.segments[-1:]:  # a first batch that failed leaves its segment behind
            self.segments.append(path)

    def _open(self, path: Path) -> None:
        """Open a segment to append to it."""
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size_bytes = os.fstat(self._file).st_size

    def _take_back(self) -> None:
        """Remove a half-done write. LogDamaged: even that failed."""
        assert self._file is not None, "a write was tried"
        try:
            os.ftruncate(self._file, self._size_bytes)
            os.fsync(self._file)
        except OSError as error:
            os.close(self._file)
            self._file = None
            raise LogDamaged(f"{self._directory}: cannot undo a failed write: {error}") from error


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
