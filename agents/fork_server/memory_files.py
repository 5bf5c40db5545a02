"""The memory of the node's shards' states (protocol/memory.py): one memfd for each, held by the fork server.

It is made with the first worker of the shard or when the agent stores a copy, released by the agent's order, and ends
with the fork server. It cannot shrink: the agent maps the pages that a worker writes to.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from unicrond.agents.protocol.memory import sealed_memory
from unicrond.agents.protocol.messages import FromForkServer, MemoryReserved, ReserveFailed
from unicrond.events.vocabulary import Name


class Memories:
    """The node's memories. `max_bytes`: the bound of each; 0: there are none. `say` sends to the agent."""

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
