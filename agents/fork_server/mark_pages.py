"""The memory of the workers' marks (protocol/marks.py): a page for each, which neither grows nor shrinks.

A page stays until the agent has acknowledged its worker's end: it shows what a worker was doing when it was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from unicrond.agents.protocol.marks import SIZE_BYTES
from unicrond.agents.protocol.memory import sealed_memory
from unicrond.events.vocabulary import WorkerId


class MarkPages:
    """The pages of the workers' marks. `directory`: where the agent looks for marks; each is a link to the page."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: dict[WorkerId, int] = {}

    def sweep(self) -> None:
        """Remove the links that lead into an earlier fork server. Raise OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for link in self._directory.iterdir():
            if link.is_symlink():
                link.unlink()

    def make(self, worker: WorkerId) -> int:
        """Make the worker's page and return its descriptor. Raise OSError."""
        fd = sealed_memory(f"mark {worker}", fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK, SIZE_BYTES)
        self._fds[worker] = fd
        link = self._directory / worker
        with contextlib.suppress(OSError):  # on a full disk there is no link
            link.unlink(missing_ok=True)
            link.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        return fd

    def forget(self, worker: WorkerId) -> None:
        """Remove the worker's page: the agent has read it."""
        fd = self._fds.pop(worker, -1)
        if fd >= 0:
            with contextlib.suppress(OSError):
                (self._directory / worker).unlink()
            os.close(fd)

    def close(self) -> None:
        """Close every descriptor, in a child or at the end."""
        for fd in self._fds.values():
            os.close(fd)
