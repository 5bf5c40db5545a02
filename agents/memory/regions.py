"""Opens the shards' memory, which the fork server holds, by the descriptor's path under /proc."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from unicrond.agents.protocol.memory import Memory
from unicrond.agents.protocol.messages import MemoryReserved, ReserveFailed, ReserveMemory
from unicrond.events.vocabulary import Name, SnapshotStored

_KEEP_TIMEOUT_S = 10.0
Key = tuple[Name, int]


class NoRegion(Exception):
    """The node has no memory for the shard, or will not reserve it; the text says why."""


class MemoryRegions:
    """Opens the memory of shards; lives in the event loop. `ask` sends to the fork server; at most `most` regions
    exist, copies included.

    `open` and `make` return a fresh opening each time; the caller closes it, and may use it in any one thread.
    """

    def __init__(self, ask: Callable[[ReserveMemory], None], most: int) -> None:
        self._ask = ask
        self._most = most
        self._pid = 0
        self._regions: dict[Key, MemoryReserved] = {}
        self._waiting: dict[Key, list[asyncio.Future[None]]] = {}

    def set_inventory(self, pid: int, regions: tuple[MemoryReserved, ...]) -> None:
        """Replace the known regions with those of the fork server `pid`."""
        self._pid = pid
        self._regions = {(region.task, region.shard): region for region in regions}

    def receive(self, message: MemoryReserved | ReserveFailed) -> None:
        """Note the fork server's answer, or the memory that it has made for a worker."""
        key = (message.task, message.shard)
        if isinstance(message, MemoryReserved):
            self._regions[key] = message
        for waiting in self._waiting.pop(key, []):
            if not waiting.done():
                if isinstance(message, MemoryReserved):
                    waiting.set_result(None)
                else:
                    waiting.set_exception(NoRegion(message.reason))

    def drop(self, task: str) -> None:
        """Drop the task's regions, or all where `task` is "": the fork server releases them."""
        self._regions = {key: region for key, region in self._regions.items() if task not in ("", key[0])}

    def of_task(self, task: Name) -> dict[int, Memory]:
        """Open all regions of the task, by shard."""
        opened = {}
        for name, shard in sorted(self._regions):
            if name == task:
                with contextlib.suppress(NoRegion):
                    opened[shard] = self.open(name, shard)
        return opened

    def open(self, task: Name, shard: int) -> Memory:
        """Open the shard's region. Raise NoRegion where there is none."""
        region = self._regions.get((task, shard))
        if region is None:
            raise NoRegion("this node keeps no state of that shard")
        try:
            return Memory(f"/proc/{self._pid}/fd/{region.fd}", region.max_bytes)
        except OSError as error:
            raise NoRegion(f"the fork server's memory cannot be opened: {error}") from None

    async def make(self, task: Name, shard: int) -> Memory:
        """Open the shard's region, and have the fork server make it first where there is none. Raise NoRegion."""
        if (task, shard) not in self._regions:
            if len(self._regions) >= self._most:
                raise NoRegion(f"this node already keeps {len(self._regions)} states and has no room for more")
            answered = asyncio.get_running_loop().create_future()
            self._waiting.setdefault((task, shard), []).append(answered)
            self._ask(ReserveMemory(task=task, shard=shard))
            try:
                async with asyncio.timeout(_KEEP_TIMEOUT_S):
                    await answered
            except TimeoutError:
                raise NoRegion("the fork server does not answer") from None
        return self.open(task, shard)

    def states(self, node: Name) -> list[SnapshotStored]:
        """Return the states in the memory now, for the log. They may have been captured elsewhere, which is not
        remembered."""
        states = []
        for task, shard in self._regions:
            try:
                memory = self.open(task, shard)
            except NoRegion:
                continue
            head = memory.newest()
            memory.close()
            if head is not None:
                states.append(
                    SnapshotStored(
                        node=node,
                        task=task,
                        shard=shard,
                        iteration=head.iteration,
                        generation=head.generation,
                        origin=node,
                        size_bytes=head.size_bytes,
                        shards=head.layout.workers,
                        duration_us=0,
                    )
                )
        return states
