"""Versions of files: cheap values that change whenever a file does."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class FileVersion(NamedTuple):
    """What `stat` says of a file that has been replaced or written since."""

    changed_at_ns: int
    inode: int
    size_bytes: int


def file_version(path: Path) -> FileVersion | None:
    """Return a value that changes whenever the file does; None if it cannot be reached."""
    try:
        status = path.stat()
    except OSError:
        return None
    return FileVersion(status.st_mtime_ns, status.st_ino, status.st_size)
