"""Keeps the training states in this node's memory: its regions, the server that gives them out, and copies to other
nodes.

Rules
-----
* The fork server holds the memory and outlives the agent; the regions here follow what it says, and are empty while
  there is none.
* Each slot has room for its own state, and for as many copies of others'.
* The server stands where that of the agent before stood, if that can be: peers have its address and token from a
  membership.
* Where nothing may be used for states, nothing is served, and the node names no service when it joins.

The bytes: memory/ (regions, server, copies). Which state is copied to whom: the core. Passes and warrants:
memberships.py. Workers that write states: trainer/.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from unicrond.agents.core.state import CopyState
from unicrond.agents.host import host_resources as host
from unicrond.agents.memory.copies import StateCopier
from unicrond.agents.memory.regions import MemoryRegions
from unicrond.agents.memory.server import MemoryServer
from unicrond.agents.protocol.memory_exchange import TLS
from unicrond.agents.protocol.messages import FromForkServer, Inventory, MemoryReserved, ReserveFailed, ReserveMemory
from unicrond.agents.shell.options import Options
from unicrond.agents.shell.run_dir import RunDir
from unicrond.events.vocabulary import MemoryService, SnapshotStored

if TYPE_CHECKING:
    from unicrond.agents.memory.peer_tokens import Credentials  # needs an extra, and so does what it imports

logger = logging.getLogger("unicrond.agents")


def memory_bytes(options: Options) -> int:
    """Return how much memory this node has for states of training; 0: none."""
    return host.memory_total_bytes() // 4 if options.memory_bytes is None else options.memory_bytes


def regions_most(options: Options) -> int:
    """Return the number of states that this node has room for: each slot's own, and as many copies of others'."""
    return 2 * options.slots


class MemoryKeeper:
    """Keeps one node's states. `ask` sends to the fork server; `on_copy` is called in the loop when a peer's copy is
    sealed."""

    def __init__(
        self,
        options: Options,
        run_dir: RunDir,
        credentials: Credentials | None,
        *,
        ask: Callable[[ReserveMemory], None],
        on_copy: Callable[[SnapshotStored], None],
    ) -> None:
        """Serve nothing yet. `credentials`: None where states travel in clear."""
        self._options = options
        self._run_dir = run_dir
        self._is_sealed = credentials is not None
        self._regions = MemoryRegions(ask, most=regions_most(options))
        self._copies = StateCopier(options.node, self._regions, credentials)
        self._port, self._token = run_dir.exchange()
        self._server = MemoryServer(options.node, self._regions, self._token, on_copy, credentials)

    def serve(self) -> MemoryService | None:
        """Take and give states from now on; return how peers reach them, None where there is no memory for states."""
        if not memory_bytes(self._options):
            return None
        address = self._options.address
        self._server.start(address, self._port)
        try:
            self._run_dir.remember_exchange(self._server.port, self._token)
        except OSError as error:
            logger.error("cannot record the port for states (%s): the next agent takes another one", error)
        token = TLS if self._is_sealed else self._token
        return MemoryService(node=self._options.node, host=address, port=self._server.port, token=token)

    def fork_server_said(self, message: FromForkServer, pid: int) -> None:
        """Follow what the fork server of that pid says of its memory."""
        if isinstance(message, Inventory):
            self._regions.set_inventory(pid, message.reserved_memory)
        elif isinstance(message, MemoryReserved | ReserveFailed):
            self._regions.receive(message)

    def fork_server_died(self) -> None:
        """Forget all states: they died with it."""
        self._regions.set_inventory(0, ())

    def drop(self, task: str) -> None:
        """Forget the states of a task that the fork server releases; "": of all."""
        self._regions.drop(task)

    def copy(self, order: CopyState, warrant: str) -> None:
        """Copy a state to a peer. `warrant`: that of the task's membership; not needed in clear."""
        self._copies.copy(order.task, order.shard, order.peers, warrant)

    def states(self) -> list[SnapshotStored]:
        """Return the states in the node's memory."""
        return self._regions.states(self._options.node)

    async def close(self) -> None:
        """Serve no longer, and cancel the copies that are under way."""
        self._server.close()
        await self._copies.close()
