"""The shards' memory that the fork server holds, as the agent reaches it: by the descriptor's path under /proc."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from agents.protocol.memory import Memory
from agents.protocol.messages import Keep, KeepFailed, Kept
from agents.state import Held
from events.vocabulary import Name

_KEEP_TIMEOUT_S = 10.0
Key = tuple[Name, int]


class NoRegion(Exception):
    """The node keeps no memory for the shard, or will not; the text says why."""


class MemoryRegions:
    """Lives in the event loop. `ask` sends to the fork server; at most `most` regions are held, copies included.

    `open` and `make` give a fresh opening each time; the caller closes it, and may use it in any one thread.
    """

    def __init__(self, ask: Callable[[Keep], None], most: int) -> None:
        self._ask = ask
        self._most = most
        self._pid = 0
        self._kept: dict[Key, Kept] = {}
        self._waiting: dict[Key, list[asyncio.Future[None]]] = {}

    def held_by(self, pid: int, kept: tuple[Kept, ...]) -> None:
        """The fork server `pid` has said what it holds."""
        self._pid = pid
        self._kept = {(one.task, one.shard): one for one in kept}

    def said(self, message: Kept | KeepFailed) -> None:
        """The fork server has answered, or has made memory for a worker."""
        key = (message.task, message.shard)
        if isinstance(message, Kept):
            self._kept[key] = message
        for waiting in self._waiting.pop(key, []):
            if not waiting.done():
                if isinstance(message, Kept):
                    waiting.set_result(None)
                else:
                    waiting.set_exception(NoRegion(message.reason))

    def forgotten(self, task: str) -> None:
        """The fork server gives up the task's, or all."""
        self._kept = {key: kept for key, kept in self._kept.items() if task not in ("", key[0])}

    def of_task(self, task: Name) -> dict[int, Memory]:
        """Openings of all that is kept of the task, by shard."""
        opened = {}
        for of, shard in sorted(self._kept):
            if of == task:
                with contextlib.suppress(NoRegion):
                    opened[shard] = self.open(of, shard)
        return opened

    def open(self, task: Name, shard: int) -> Memory:
        """Raises NoRegion."""
        kept = self._kept.get((task, shard))
        if kept is None:
            raise NoRegion("this node keeps no state of it")
        try:
            return Memory(f"/proc/{self._pid}/fd/{kept.fd}", kept.max_bytes)
        except OSError as error:
            raise NoRegion(f"the fork server's memory cannot be opened: {error}") from None

    async def make(self, task: Name, shard: int) -> Memory:
        """The same, and there from now on. Raises NoRegion."""
        if (task, shard) not in self._kept:
            if len(self._kept) >= self._most:
                raise NoRegion(f"this node already keeps {len(self._kept)} states and has no room for more")
            answered = asyncio.get_running_loop().create_future()
            self._waiting.setdefault((task, shard), []).append(answered)
            self._ask(Keep(task=task, shard=shard))
            try:
                async with asyncio.timeout(_KEEP_TIMEOUT_S):
                    await answered
            except TimeoutError:
                raise NoRegion("the fork server does not answer") from None
        return self.open(task, shard)

    def found(self, node: Name) -> list[Held]:
        """What is in the memory now, for the log; it may have been captured elsewhere, which is not remembered."""
        found = []
        for task, shard in self._kept:
            try:
                memory = self.open(task, shard)
            except NoRegion:
                continue
            head = memory.newest()
            memory.close()
            if head is not None:
                found.append(
                    Held(
                        task=task,
                        shard=shard,
                        iteration=head.iteration,
                        generation=head.generation,
                        origin=node,
                        size_bytes=head.size_bytes,
                        shards=head.layout.workers,
                    )
                )
        return found
