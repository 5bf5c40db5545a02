"""Other nodes that keep states in memory, for tests of a single one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

from unicrond.agents.memory.peer_tokens import Credentials
from unicrond.agents.memory.regions import MemoryRegions, NoRegion
from unicrond.agents.memory.server import MemoryServer
from unicrond.agents.protocol.memory import Memory
from unicrond.agents.protocol.memory_exchange import TLS
from unicrond.events.vocabulary import MemoryService, SnapshotStored

TOKEN = "a token"


class OtherNode:
    """Another node's memory of a task's shards, served by the real server in a loop of its own."""

    def __init__(self, node: str, shards: Mapping[int, Memory], credentials: Credentials | None = None) -> None:
        self._node, self._shards, self._credentials = node, shards, credentials
        self.copies: list[SnapshotStored] = []

    def __enter__(self) -> MemoryService:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = MemoryServer(self._node, Regions(self._shards), TOKEN, self.copies.append, self._credentials)
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        token = TLS if self._credentials else TOKEN
        return MemoryService(node=self._node, host="127.0.0.1", port=self._server.port, token=token)

    async def _start(self) -> None:
        self._server.start("127.0.0.1", 0)

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Regions(MemoryRegions):
    """The shards' regions, whatever the task; held by the test."""

    def __init__(self, shards: Mapping[int, Memory]) -> None:
        super().__init__(lambda _: None, 1)
        self._shards = shards

    def of_task(self, task: str) -> dict[int, Memory]:
        return {shard: memory.reopen() for shard, memory in self._shards.items()}

    def open(self, task: str, shard: int) -> Memory:
        if shard not in self._shards:
            raise NoRegion("this node keeps no state of it")
        return self._shards[shard].reopen()

    async def make(self, task: str, shard: int) -> Memory:
        return self.open(task, shard)
