"""Paths of an agent: its run directory, its workers' output, and whether a Unix socket still stands at its path.

Every program that asks the agent imports this, a probe every few seconds: it imports next to nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicrond.events.vocabulary import Name, WorkerId

PROBE_SOCKET = "probe.sock"


def default_run_dir(node: str) -> Path:
    """Return $XDG_RUNTIME_DIR/unicron/<node>, or /tmp/unicron-<uid>/<node> where that variable is not set."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "unicron" if runtime else Path(f"/tmp/unicron-{os.getuid()}")
    return base / node


def worker_log(logs: Path, task: Name, worker: WorkerId) -> Path:
    """Return where a worker's output lies: `<logs>/<task>/<worker>.log`; rotated parts stand beside it as `.log.1`
    (newest), `.log.2`, ...

    Names obey their patterns (no slash, no dot-dot), so no path escapes `logs`.
    """
    return logs / task / f"{worker}.log"


class BoundPath:
    """A path to which a listening socket was just bound. Its file may be unlinked or replaced: then nobody can connect
    any more, while open connections live on."""

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
