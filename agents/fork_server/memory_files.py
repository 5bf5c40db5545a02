"""The memory files (memfds) that the fork server holds for workers, so that their contents outlive a worker.

Rules
-----
* One for the states of each shard of a task (protocol/memory.py). It is made with the first worker of the shard or when
  the agent stores a copy, released by the agent's order, and ends with the fork server. It cannot shrink: the agent
  maps the pages that a worker writes to.
* One page for each worker's mark (protocol/marks.py), which neither grows nor shrinks. It stays until the agent has
  acknowledged its worker's end: it shows what a worker was doing when it was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from unicrond.agents.protocol.marks import SIZE_BYTES
from unicrond.agents.protocol.memory import sealed_memory
from unicrond.agents.protocol.messages import FromForkServer, MemoryReserved, ReserveFailed
from unicrond.events.vocabulary import Name, WorkerId


class Memories:
    """The memory files of the node's shards. `max_bytes`: the bound of each; 0: there are none. `say` sends to the
    agent."""

    def __init__(self, max_bytes: int, say: Callable[[FromForkServer], None]) -> None:
        self.max_bytes = max_bytes
        self._say = say
        self._fds: dict[tuple[Name, int], int] = {}

    def reserve(self, task: Name, shard: int) -> int:
        """Return the descriptor of the shard's memory, made where it is missing; -1 where that is impossible."""
        if (task, shard) not in self._fds:
            try:
                self._fds[task, shard] = sealed_memory(f"unicron {task}/{shard}", fcntl.F_SEAL_SHRINK)
            except OSError as error:
                self._say(ReserveFailed(task=task, shard=shard, reason=str(error)))
                return -1
        self._say(self._reserved(task, shard))
        return self._fds[task, shard]

    def regions(self) -> tuple[MemoryReserved, ...]:
        """Return a message for each memory."""
        return tuple(self._reserved(task, shard) for task, shard in self._fds)

    def release(self, task: str) -> None:
        """Release the memories of the task; of all tasks where it is ""."""
        for key in [key for key in self._fds if task in ("", key[0])]:
            os.close(self._fds.pop(key))

    def close(self) -> None:
        """Close the descriptors, in a child."""
        for fd in self._fds.values():
            os.close(fd)

    def _reserved(self, task: Name, shard: int) -> MemoryReserved:
        return MemoryReserved(task=task, shard=shard, fd=self._fds[task, shard], max_bytes=self.max_bytes)


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
        with contextlib.suppress(OSError):  # a full disk takes no link
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
