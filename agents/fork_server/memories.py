"""The memory of the node's shards' states (protocol/memory.py): one memfd for each, held by the fork server.

It is made with the first worker of the shard or when the agent wants to keep a copy, given up when the agent says so,
and gone with the fork server. It cannot shrink: the agent maps what a worker writes to.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from agents.protocol.memory import sealed_memory
from agents.protocol.messages import FromForkServer, KeepFailed, Kept
from events.vocabulary import Name


class Memories:
    """`max_bytes`: the bound of each; 0: none is held. `say`: to the agent."""

    def __init__(self, max_bytes: int, say: Callable[[FromForkServer], None]) -> None:
        self.max_bytes = max_bytes
        self._say = say
        self._fds: dict[tuple[Name, int], int] = {}

    def keep(self, task: Name, shard: int) -> int:
        """The descriptor of the shard's memory, there from now on; -1 where there is none to be had."""
        if (task, shard) not in self._fds:
            try:
                self._fds[task, shard] = sealed_memory(f"unicron {task}/{shard}", fcntl.F_SEAL_SHRINK)
            except OSError as error:
                self._say(KeepFailed(task=task, shard=shard, reason=str(error)))
                return -1
        self._say(self._kept(task, shard))
        return self._fds[task, shard]

    def kept(self) -> tuple[Kept, ...]:
        """All that are held."""
        return tuple(self._kept(task, shard) for task, shard in self._fds)

    def forget(self, task: str) -> None:
        """Give up those of the task; of all tasks where it is ""."""
        for key in [key for key in self._fds if task in ("", key[0])]:
            os.close(self._fds.pop(key))

    def close(self) -> None:
        """In a child: its copies of the descriptors."""
        for fd in self._fds.values():
            os.close(fd)

    def _kept(self, task: Name, shard: int) -> Kept:
        return Kept(task=task, shard=shard, fd=self._fds[task, shard], max_bytes=self.max_bytes)
