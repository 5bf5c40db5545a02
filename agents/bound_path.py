"""Whether a Unix socket can still be found: its file may have been unlinked or replaced."""

from __future__ import annotations

from pathlib import Path


class BoundPath:
    """A path that a listening socket was just bound to. Connections live on whatever becomes of the file."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where nothing is there."""
        self._path = path
        self._identity = _identity(path)

    def holds(self) -> bool:
        """Whether the file is still the one that was bound."""
        try:
            return _identity(self._path) == self._identity
        except OSError:
            return False


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.lstat()
    # An inode's number is given again at once; that of another file was made at another time.
    return status.st_dev, status.st_ino, status.st_ctime_ns
