"""Whether a Unix socket can still be found: its file may have been unlinked or replaced."""

from __future__ import annotations

from pathlib import Path


class BoundPath:
    """A path to which a listening socket was just bound. Open connections survive whatever becomes of the file."""

    def __init__(self, path: Path) -> None:
        """Remember which file is at the path. Raise OSError where there is none."""
        self._path = path
        self._identity = _identity(path)

    def holds(self) -> bool:
        """Return whether the path still leads to the file that was bound."""
        try:
            return _identity(self._path) == self._identity
        except OSError:
            return False


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.lstat()
    # The kernel reuses an inode's number at once, but another file has another time of creation.
    return status.st_dev, status.st_ino, status.st_ctime_ns
