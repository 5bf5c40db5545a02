"""Copies this node's newest states to other nodes: for each shard one copy at a time, and always of the newest
state."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from unicrond.agents.memory.regions import MemoryRegions, NoRegion
from unicrond.agents.protocol import memory_exchange
from unicrond.agents.protocol.memory import Memory
from unicrond.agents.protocol.memory_exchange import ExchangeFailed
from unicrond.agents.protocol.messages import Passes
from unicrond.events.vocabulary import MemoryService, Name

if TYPE_CHECKING:
    from unicrond.agents.memory.peer_tokens import Credentials  # needs an extra

logger = logging.getLogger(__name__)


class StateCopier:
    """Copies states to peers. `copy` may be called whenever a state comes; one that comes during a copy is copied
    next."""

    def __init__(self, node: Name, regions: MemoryRegions, credentials: Credentials | None = None) -> None:
        """Take the node's `credentials`; without them copies travel in clear."""
        self._node = node
        self._regions = regions
        self._credentials = credentials
        self._requests: dict[tuple[Name, int], tuple[tuple[MemoryService, ...], str]] = {}
        self._tasks: dict[tuple[Name, int], asyncio.Task[None]] = {}

    def copy(self, task: Name, shard: int, peers: tuple[MemoryService, ...], warrant: str = "") -> None:
        """Have the first of `peers` that accepts it store the newest state of the shard.

        `warrant`: that of the task's membership, with this node's place; not needed in clear.
        """
        key = (task, shard)
        self._requests[key] = peers, warrant
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run(key), name=f"copy {task}/{shard}")

    async def close(self) -> None:
        """Cancel the copies that are under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: tuple[Name, int]) -> None:
        try:
            while key in self._requests:
                peers, warrant = self._requests.pop(key)
                try:
                    memory = self._regions.open(*key)
                except NoRegion:
                    return  # the task has ended in the meantime
                await asyncio.to_thread(self._push, key, memory, peers, warrant)
        finally:
            del self._tasks[key]

    def _push(self, key: tuple[Name, int], memory: Memory, peers: tuple[MemoryService, ...], warrant: str) -> None:
        try:
            newest = memory.newest()
            if newest is None:
                return
            with memory.reading(newest.iteration) as state:
                if state is None:
                    return  # a newer one is being written; it is reported when it is sealed
                passes = self._passes(peers, key[0], warrant)
                label, refusals = f"{key[0]}/{key[1]} after iteration {newest.iteration}", []
                for peer in peers:
                    try:
                        memory_exchange.push(peer, key[0], key[1], self._node, *state, passes)
                        return
                    except ExchangeFailed as error:  # for example a node that leaves: the next peer takes it
                        refusals.append(f"{peer.node}: {error}")
                        logger.info("%s is not copied to %s: %s", label, peer.node, error)
                if refusals:
                    logger.warning("no copy of %s: %s", label, "; ".join(refusals))
        finally:
            memory.close()

    def _passes(self, peers: tuple[MemoryService, ...], task: Name, warrant: str) -> Passes | None:
        if self._credentials is None:
            return None
        return self._credentials.passes(tuple(peer.node for peer in peers), task, warrant, datetime.now(UTC))
