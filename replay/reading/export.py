"""A log in one file, whole or not at all: what people attach to a bug report and replay elsewhere.

It holds the entries, and the heartbeats that were retained (`verify` derives node losses from them).

The file is one segment (`events/log/segments.py`) of any length, and a mark at its end says how much it holds. It is
written beside its place under a temporary name, made durable, and renamed: no reader ever sees half of it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType

from unicrond.events.log.event_log import LogDamaged
from unicrond.events.log.segments import batch_frame, beats_frame, end_frame, export_start
from unicrond.events.wire.envelope import Entry, RecordedEvent


class Export:
    """A context: `write` the entries in order; leaving it without an exception puts the file in its place.

    Raises OSError. Readable by its owner only, as events hold the tasks' arguments and environment.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_seq = 0
        self._beats = 0

    def __enter__(self) -> Export:
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.", suffix=".part")
        self._file = os.fdopen(descriptor, "wb")
        self._temporary = Path(name)
        self._file.write(export_start())
        return self

    def write(self, entries: list[Entry]) -> None:
        """Write consecutive entries; the first one ever is entry 1. Raises LogDamaged where one is missing."""
        for entry in entries:
            if entry.seq != self._last_seq + 1:
                raise LogDamaged(f"entry {entry.seq} follows entry {self._last_seq}; an export holds all from 1 on")
            self._last_seq = entry.seq
        if entries:
            self._file.write(batch_frame(entries))

    def write_beats(self, beats: list[RecordedEvent]) -> None:
        """Write heartbeats, at any time."""
        if beats:
            self._beats += len(beats)
            self._file.write(beats_frame(beats))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.write(end_frame(self._last_seq, self._beats))
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                self._temporary.replace(self._path)
                _sync_directory(self._path.parent)
        finally:
            self._temporary.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
