"""A model of a node's fork server, for the real agent (its rules: agents/fork_server/server.py)."""

from __future__ import annotations

import signal
from typing import Protocol

from unicrond.agents.protocol.messages import (
    FromForkServer,
    Inventory,
    InventoryWorker,
    Kill,
    ProcessExitAck,
    ProcessExited,
    ProcessForked,
    ReleaseMemory,
    Retire,
    Spawn,
    ToForkServer,
)
from unicrond.events.vocabulary.shape import Shape
from unicrond.replay.simulation.checks.checker import InvariantChecker
from unicrond.replay.simulation.checks.ports import CheckedHost
from unicrond.replay.simulation.models.memory import NodeMemory
from unicrond.replay.simulation.models.network import Pipe
from unicrond.replay.simulation.trainer.process import Process, ProcessHost


class ForkServerHost(ProcessHost, CheckedHost, Protocol):
    """A node, as its fork server needs it."""

    checker: InvariantChecker
    launched: dict[str, Process]

    def next_pid(self) -> int:
        """Return a process id that was not used before on this node."""
        ...

    def fork_server_died(self, server: object) -> None:
        """Show the agent the end of its connection."""
        ...


class SimulatedForkServer:
    """The parent of the node's workers. `port`: that of its rendezvous store."""

    def __init__(self, host: ForkServerHost, port: int) -> None:
        self.host = host
        self.port = port
        self.alive = True
        self.processes: dict[str, Process] = {}
        self.memory = NodeMemory()
        self._exits: dict[str, ProcessExited] = {}
        self._agent: Pipe[FromForkServer] | None = None
        self._lonely_since_s = host.loop.time()
        self._check_lease()

    # --- the agent -------------------------------------------------------------------------------

    def connect(self, agent: Pipe[FromForkServer]) -> None:
        """Serve a new agent, and it alone: it receives what no agent has acknowledged, then the inventory."""
        if self._agent is not None:
            self._agent.close()
        self._agent = agent
        for message in self._exits.values():
            agent.send(message)
        workers = tuple(
            InventoryWorker(worker=p.worker, task=p.launch.task, pid=p.pid, slot=p.slot)
            for p in self.processes.values()
        )
        agent.send(Inventory(store_port=self.port, workers=workers, degrees=Shape._fields))

    def lose_agent(self, agent: Pipe[FromForkServer]) -> None:
        """Handle that the connection has ended."""
        if self._agent is agent:
            self._agent = None
            self._lonely_since_s = self.host.loop.time()

    def _check_lease(self) -> None:
        if not self.alive:
            return
        if self._agent is None and self.host.loop.time() - self._lonely_since_s >= self.host.lease_s:
            self.die()
        else:
            self.host.loop.call_later(0.5, self._check_lease)

    def handle(self, message: ToForkServer) -> None:
        """Handle a message of the agent."""
        if not self.alive:
            return
        match message:
            case Spawn():
                self._spawn(message)
            case Kill(worker=worker, signal=number):
                if worker in self.processes:
                    self.processes[worker].signal(number)
            case ProcessExitAck(worker=worker):
                self._exits.pop(worker, None)
            case ReleaseMemory(task=task):
                self.memory.forget(task)
            case Retire():
                self.die()

    def _send(self, message: FromForkServer) -> None:
        if self._agent is not None:
            self._agent.send(message)

    # --- workers ---------------------------------------------------------------------------------

    def _spawn(self, spawn: Spawn) -> None:
        worker = spawn.launch.worker
        if worker in self.processes:
            self._send(ProcessForked(worker=worker, pid=self.processes[worker].pid))
        elif worker in self._exits:
            self._send(self._exits[worker])
        else:
            process = Process(self.host, spawn.launch, self.host.next_pid(), spawn.slot)
            self.host.checker.worker_spawned(self.host, process)
            self.processes[worker] = self.host.launched[worker] = process
            self._send(ProcessForked(worker=worker, pid=process.pid))

    def reap(self, process: Process) -> None:
        """Report a child that has ended."""
        if self.processes.get(process.worker) is process and self.alive:
            del self.processes[process.worker]
            assert process.ended is not None
            self._exits[process.worker] = ProcessExited(worker=process.worker, pid=process.pid, status=process.ended)
            self._send(self._exits[process.worker])

    def die(self) -> None:
        """End; the kernel ends its workers with it."""
        if self.alive:
            self.alive = False
            for process in list(self.processes.values()):
                process.end(signal.SIGKILL)
            self.host.fork_server_died(self)
