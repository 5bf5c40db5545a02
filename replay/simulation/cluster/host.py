"""A node: its disk, its fork server, its agent, its clock, its links."""

from __future__ import annotations

import random
from collections.abc import Callable

from unicrond.agents.core.state import StateHeld
from unicrond.agents.protocol.messages import FromWorker, GroupMembership
from unicrond.replay.simulation.cluster.agent import SimulatedAgent
from unicrond.replay.simulation.cluster.fork_server import SimulatedForkServer
from unicrond.replay.simulation.cluster.log_client import ClusterParts
from unicrond.replay.simulation.cluster.run_dir import RunDisk
from unicrond.replay.simulation.models.memory import Copy, NodeMemory, snapshot
from unicrond.replay.simulation.models.network import Link, Pipe
from unicrond.replay.simulation.models.virtual_time import HostClock
from unicrond.replay.simulation.trainer.process import Process
from unicrond.replay.simulation.trainer.training import Training


class Host:
    """One node. Faults are its methods; `run_agent` is the supervisor."""

    def __init__(
        self,
        name: str,
        slots: int,
        parts: ClusterParts,
        training: Training,
        rng: random.Random,
        *,
        schema: int,
        gpu: str = "",
        domain: str = "",
    ) -> None:
        self.name = name
        self.slots = slots
        self.parts = parts
        self.loop = parts.loop
        self.server = parts.server
        self.beats = parts.beats
        self.checker = parts.checker
        self.heartbeat_s = parts.heartbeat_s
        self.lease_s = parts.lease_s
        self.start_max_age_s = parts.start_max_age_s
        self.training = training
        self.rng = rng
        #: The schema of the version that is installed here (events/wire/schemas.py); the next agent has it.
        self.schema = schema
        #: The type of its GPUs, as its agent reports it.
        self.gpu = gpu
        #: What fails as one with it, as its agent tells it.
        self.domain = domain
        self.clock = HostClock(self.loop)
        self.link = Link(self.loop, rng)
        self.disk = RunDisk()
        self.on = True
        #: Its hardware is broken: it fails its health checks, each of which takes `check_s`.
        self.is_unhealthy = False
        self.check_s = 1.5
        self.has_left = False
        #: With its agent's end its pod ends: the next one has another run directory.
        self.pod_ends = False
        #: When False, an agent that ends stays away until somebody starts it.
        self.supervised = True
        #: Its agent has ended for a newer one of its name: only a person starts it again.
        self.superseded = False
        #: Another machine whose agent has this name too, by a mistake.
        self.twin: Host | None = None
        self.is_twin = False
        self.agent: SimulatedAgent | None = None
        self.fork_server: SimulatedForkServer | None = None
        #: Workers whose marks lie in the run directory.
        self.launched: dict[str, Process] = {}
        self._starting_fork_server = False
        self._pid = 100
        self._store_port = 4000
        self._power = 0

    # --- what runs -------------------------------------------------------------------------------

    def run_agent(self) -> None:
        """Start the agent, where none lives."""
        should_run = self.supervised and not self.has_left and not self.superseded
        if self.on and should_run and (self.agent is None or not self.agent.alive):
            self.agent = SimulatedAgent(self)

    def let_run(self) -> None:
        """Start the agent of a node that had left, as a person would."""
        self.has_left = False
        self.run_agent()

    def start_fork_server(self) -> None:
        """Begin to load a fork server; it serves a little later."""
        if not self._starting_fork_server:
            self._starting_fork_server = True
            self._later(self.rng.uniform(0.2, 1.0), self._fork_server_serves)

    def _fork_server_serves(self) -> None:
        self._starting_fork_server = False
        if self.fork_server is None or not self.fork_server.alive:
            self._store_port += 1
            self.fork_server = SimulatedForkServer(self, self._store_port)

    def _later(self, after_s: float, do: Callable[[], None]) -> None:
        """Call `do` after `after_s`, unless the power is cut before."""
        power = self._power
        self.loop.call_later(after_s, lambda: do() if power == self._power and self.on else None)

    def next_pid(self) -> int:
        """Return a process id that was not used before on this node."""
        self._pid += 1
        return self._pid

    def start_twin(self) -> Host:
        """Start another machine, as large and with the same name."""
        twin = Host(self.name, self.slots, self.parts, self.training, self.rng, schema=self.schema, gpu=self.gpu)
        twin.is_twin = True
        twin._pid, twin._store_port = 10_000, 5_000
        # The history of the name is in two memories now.
        self.disk.was_full = twin.disk.was_full = True
        self.twin = twin
        twin.run_agent()
        return twin

    # --- what ends -------------------------------------------------------------------------------

    def agent_ended(self, agent: object) -> None:
        """Let the supervisor start the next agent."""
        if self.pod_ends:
            self.pod_ends = False
            self._end_fork_server()
            self._lose_disk()
        if self.agent is agent and not self.has_left:
            self._later(self.rng.uniform(0.1, 1.5), self.run_agent)

    def fork_server_died(self, server: object) -> None:
        """Show the agent the end of its connection."""
        if self.agent is not None and self.agent.alive and self.fork_server is server:
            self.agent.lose_fork_server(has_died=True)

    def worker_built(self, process: Process) -> None:
        """Let a process train that has built its model."""
        self.training.enter(process)

    def membership_received(self, task: str, worker: str, membership: GroupMembership) -> None:
        """Show the checker a membership that a worker receives for the first time."""
        self.checker.membership_received(task, worker, membership)

    def process_ended(self, process: Process) -> None:
        """Show the agent the end of the connection, and let the fork server reap the child; in no certain order."""
        if self.agent is not None and self.agent.alive:
            self.agent.worker_ended(process.worker)
        if self.fork_server is not None and self.fork_server.alive:
            self.loop.call_later(self.rng.uniform(0.001, 0.02), self.fork_server.reap, process)

    def power_off(self) -> None:
        """End everything on the node at once."""
        if self.on:
            self.on = False
            self._power += 1
            self._starting_fork_server = False
            self.launched.clear()
            agent, self.agent = self.agent, None
            if agent is not None:
                agent.crash()
            self._end_fork_server()

    def kill(self, agent: SimulatedAgent) -> None:
        """Kill the agent and all its processes (SIGKILL), if it still lives."""
        if agent is self.agent and agent.alive:
            self._end_fork_server()
            agent.crash()

    def _end_fork_server(self) -> None:
        if self.fork_server is not None:
            self.fork_server.die()
            self.fork_server = None

    def _lose_disk(self) -> None:
        self.disk = RunDisk(self.disk.boot)
        self.checker.disk_lost(self)

    def drop_network(self, seconds: float) -> None:
        """Cut the node's links, and mend them after `seconds`."""
        reach, peers = self.training.reach, [name for name in self.training.hosts if name != self.name]
        self.link.cut = True
        for peer in peers:
            reach.cut(self.name, peer)

        def mend() -> None:
            """Restore the links."""
            self.link.cut = False
            for peer in peers:
                reach.mend(self.name, peer)

        self.loop.call_later(seconds, mend)

    def power_on(self, *, disk_lost: bool = False) -> None:
        """Boot the node; a run directory in memory is empty then."""
        if not self.on:
            self.on = True
            if disk_lost:
                self._lose_disk()
            self._later(self.rng.uniform(0.3, 2.0), self.run_agent)

    # --- lines -----------------------------------------------------------------------------------

    def connect_worker(self, process: Process) -> Pipe[FromWorker] | None:
        """Open a worker's connection to the agent; None while none listens."""
        if self.agent is None or not self.agent.alive:
            return None
        return self.agent.accept(process)

    def store_serves(self, port: int) -> bool:
        """Return whether the node's rendezvous store answers at the port."""
        if self.twin is not None and self.twin.store_serves(port):
            return True
        return self.on and self.fork_server is not None and self.fork_server.alive and self.fork_server.port == port

    # --- states in memory ------------------------------------------------------------------------

    @property
    def memory(self) -> NodeMemory | None:
        """Return the states that the node stores; None while its fork server does not live."""
        server = self.fork_server
        return server.memory if self.on and server is not None and server.alive else None

    def serves_memory_to(self, peer: str) -> bool:
        """Return whether the node's agent answers another node's requests for states."""
        answers = self.on and self.agent is not None and self.agent.alive
        return answers and self.training.reach.reaches(self.name, peer)

    def keep_copy(self, worker: str, task: str, shard: int, copy: Copy) -> bool:
        """Store a state of a worker; return False where the fork server has no such worker."""
        if self.fork_server is None or worker not in self.fork_server.processes:
            return False
        self.fork_server.memory.keep(task, shard, copy)
        return True

    def accept_copy(self, origin: str, task: str, shard: int, copy: Copy) -> bool:
        """Store a copy of a state of `origin` and show it to the agent; return False where the node does not serve
        `origin`, or has no fork server."""
        if not self.serves_memory_to(origin) or self.fork_server is None:
            return False
        copy = copy._replace(origin=origin)
        self.fork_server.memory.keep(task, shard, copy)
        if self.agent is not None:
            self.agent.feed(StateHeld(snapshot=snapshot(self.name, task, shard, copy)))
        return True

    # --- what others see -------------------------------------------------------------------------

    @property
    def shares_name(self) -> bool:
        """Check that another machine has its name."""
        return self.is_twin or self.twin is not None

    @property
    def remembers(self) -> bool:
        """Check that every memory that its agents wrote was stored."""
        return not self.disk.was_full

    @property
    def processes(self) -> list[Process]:
        """List the node's living workers."""
        return list(self.fork_server.processes.values()) if self.fork_server is not None else []
