"""A cgroup (v2) for each worker: what it starts cannot leave it, is bounded with it, and ends with it.

Rules
-----
* A worker enters its cgroup before it becomes its user, and a user may not leave it.
* When the worker has ended, all that is left in its cgroup is killed, whatever session or user it made for itself.
* What a fork server that was killed has left is killed by the next one, before it serves.
* Without a directory nothing of this happens: the agent has said so.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger("agents.fork_server")


class Cgroups:
    """`place`: the directory for them, None: none are made. `limits`: file of a cgroup -> what is written to it."""

    def __init__(self, place: Path | None, limits: Mapping[str, str]) -> None:
        self._place = place
        self._limits = limits
        #: Of ended workers, with processes that are about to be gone.
        self._emptying: set[Path] = set()

    def sweep(self) -> None:
        """End what an earlier fork server has left."""
        if self._place is None:
            return
        try:
            self._place.mkdir(exist_ok=True)
            left = [directory for directory in self._place.iterdir() if directory.is_dir()]
        except OSError as error:
            logger.error("no cgroups below %s: %s; no worker starts", self._place, error.strerror)
            return
        for directory in left:
            self._end(directory)

    def make(self, worker: str) -> Path | None:
        """The worker's, with its limits. Raises OSError."""
        if self._place is None:
            return None
        directory = self._place / worker
        directory.mkdir(exist_ok=True)
        for name, value in self._limits.items():
            (directory / name).write_text(value)
        return directory

    def ended(self, worker: str) -> None:
        """End what the worker has left."""
        if self._place is not None:
            self._end(self._place / worker)

    def tidy(self) -> None:
        """Remove those that are empty by now."""
        for directory in tuple(self._emptying):
            with contextlib.suppress(OSError):
                directory.rmdir()
                self._emptying.discard(directory)

    def _end(self, directory: Path) -> None:
        if not directory.exists():
            return
        try:
            (directory / "cgroup.kill").write_text("1")
        except FileNotFoundError:
            _kill_each(directory)  # Linux before 5.14
        except OSError as error:
            logger.error("what %s has left cannot be ended: %s", directory.name, error.strerror)
        self._emptying.add(directory)
        self.tidy()


def enter(directory: Path, pid: int = 0) -> None:
    """Move a process there; 0: this one. Raises OSError."""
    (directory / "cgroup.procs").write_text(str(pid))


def _kill_each(directory: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (directory / "cgroup.procs").read_text("ascii").split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), 9)
