"""The memory of the workers' marks (protocol/marks.py): a page for each, which neither grows nor shrinks.

A page stays until the agent has acknowledged its worker's end: it says where a worker was when it was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from agents.protocol.marks import SIZE_BYTES
from agents.protocol.memory import sealed_memory
from events.vocabulary import WorkerId


class MarkPages:
    """`directory`: where the agent looks for marks; each is a link to the page."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: dict[WorkerId, int] = {}

    def sweep(self) -> None:
        """Remove what leads into an earlier fork server. Raises OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for link in self._directory.iterdir():
            if link.is_symlink():
                link.unlink()

    def make(self, worker: WorkerId) -> int:
        """The descriptor of the worker's page. Raises OSError."""
        fd = sealed_memory(f"mark {worker}", fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK, SIZE_BYTES)
        self._fds[worker] = fd
        link = self._directory / worker
        with contextlib.suppress(OSError):  # on a full disk the line is lost
            link.unlink(missing_ok=True)
            link.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        return fd

    def forget(self, worker: WorkerId) -> None:
        """The agent knows where the worker was."""
        fd = self._fds.pop(worker, -1)
        if fd >= 0:
            with contextlib.suppress(OSError):
                (self._directory / worker).unlink()
            os.close(fd)

    def close(self) -> None:
        """In a child, or at the end: every descriptor."""
        for fd in self._fds.values():
            os.close(fd)
