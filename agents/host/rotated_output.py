"""Writes a worker's output to disk, bounded: `worker.log`, and older parts as `worker.log.1` (newest) to
`.log.<keep>`."""

from __future__ import annotations

import os
from pathlib import Path

MAX_BYTES = 16 * 1024 * 1024
KEEP = 2


class RotatedLog:
    """An append-only log with rotation. Where the disk is full or lost, it drops output and counts the lost bytes; it
    never blocks the writer."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, keep: int = KEEP) -> None:
        """Open for appending; the directory is made. Raise OSError where that fails."""
        self.path = path
        self._max_bytes = max_bytes
        self._keep = keep
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = self._open()
        self._size_bytes = os.fstat(self._fd).st_size
        self.lost_bytes = 0

    def write(self, data: bytes) -> None:
        """Append all of `data`; a part is closed where the next chunk would pass `max_bytes`."""
        if self._size_bytes and self._size_bytes + len(data) > self._max_bytes:
            self._rotate()
        view = memoryview(data)
        while view:
            try:
                count = os.write(self._fd, view)
            except OSError:
                self.lost_bytes += len(view)
                return
            self._size_bytes += count
            view = view[count:]

    def close(self) -> None:
        """Close the file; more than once is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _rotate(self) -> None:
        try:
            for number in range(self._keep, 0, -1):
                older = self._part(number - 1)
                if older.exists():
                    older.replace(self._part(number))
            fresh = self._open()
        except OSError:
            return  # go on with the part that is open
        os.close(self._fd)
        self._fd = fresh
        self._size_bytes = 0

    def _part(self, number: int) -> Path:
        return self.path if number == 0 else self.path.with_name(f"{self.path.name}.{number}")


def tail(path: Path, size_bytes: int) -> bytes:
    """Return the last `size_bytes` of a log, across one rotation; empty where there is none."""
    content = _last_bytes(path, size_bytes)
    if len(content) < size_bytes:
        content = _last_bytes(path.with_name(f"{path.name}.1"), size_bytes - len(content)) + content
    return content


def _last_bytes(path: Path, size_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size_bytes))
            return file.read(size_bytes)
    except OSError:
        return b""
