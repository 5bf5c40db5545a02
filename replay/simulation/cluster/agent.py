"""The agent in virtual time: the real core, shell (agents/shell/shell.py) and outbox, on modelled connections.

It may be killed anywhere: before the memory is written, after it, between two actions, around an append."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from unicrond.agents.core.agent_config import AgentConfig
from unicrond.agents.core.state import (
    Action,
    Checked,
    CopyState,
    Drain,
    ForkServerDied,
    HandOver,
    InjectIntoNode,
    Input,
    LeaveNow,
    LogSeen,
    NodeFaultInjected,
    Remembered,
    RunCheck,
    TakeStacks,
    WorkerDisconnected,
    WorkerSaid,
)
from unicrond.agents.protocol.messages import FromForkServer, FromWorker, Hello, ToForkServer, ToWorker
from unicrond.agents.shell.duplicate_agent import DuplicateAgents, until_alone
from unicrond.agents.shell.outbox import Outbox
from unicrond.agents.shell.shell import Shell
from unicrond.events.vocabulary import MemoryService, ProbeLinks, SnapshotStored, StacksTaken, WorkerStack
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.events.wire.schemas import FIRST, schema_of, spoken_schema, told_version
from unicrond.replay.simulation.checks.checker import InvariantChecker
from unicrond.replay.simulation.checks.ports import CheckedHost
from unicrond.replay.simulation.cluster.fork_server import SimulatedForkServer
from unicrond.replay.simulation.cluster.link_prober import SimulatedProber
from unicrond.replay.simulation.cluster.log_client import BeatEnd, Beats, CommandEnd, Endpoint
from unicrond.replay.simulation.cluster.log_server import LogServer
from unicrond.replay.simulation.cluster.run_dir import HostSigns, RunDisk
from unicrond.replay.simulation.models.network import Link, Pipe
from unicrond.replay.simulation.models.virtual_time import HostClock
from unicrond.replay.simulation.trainer.process import Process
from unicrond.replay.simulation.trainer.training import Training


class AgentHost(CheckedHost, Protocol):
    """A node, as its agent needs it."""

    loop: asyncio.AbstractEventLoop
    rng: random.Random
    clock: HostClock
    link: Link
    disk: RunDisk
    server: LogServer
    beats: Beats
    training: Training
    checker: InvariantChecker
    fork_server: SimulatedForkServer | None
    launched: dict[str, Process]
    slots: int
    gpu: str
    domain: str
    schema: int
    heartbeat_s: float
    start_max_age_s: float
    check_s: float
    is_unhealthy: bool
    has_left: bool
    superseded: bool

    @property
    def shares_name(self) -> bool:
        """Check that another machine has its name."""
        ...

    def let_run(self) -> None:
        """Start the agent of a node that had left, as a person would."""
        ...

    def start_fork_server(self) -> None:
        """Begin to load a fork server."""
        ...

    def drop_network(self, seconds: float) -> None:
        """Cut the node's links, and mend them after `seconds`."""
        ...

    def agent_ended(self, agent: object) -> None:
        """Let the supervisor start the next agent."""
        ...


class SimulatedAgent(Shell):
    """One run of a node's agent, from its start to its end."""

    def __init__(self, host: AgentHost) -> None:
        self.host = host
        self.boot = host.disk.next_boot(host.clock.wall_us())
        self.schema = host.schema
        config = AgentConfig(
            node=host.name,
            address=host.name,
            slots=host.slots,
            version=told_version("simulated", self.schema),
            agent_boot=self.boot,
            agent_socket="/run/agent.sock",
            logs="/run/logs",
            grace_s=2.0,
            kill_after_s=1.0,
            slot_wait_s=6.0,
            fork_server_wait_s=15.0,
            start_max_age_s=host.start_max_age_s,
            hello_wait_s=1.0,
            commit_interval_s=1.0,
            held_interval_s=6.0,
            gpu=host.gpu,
            domain=host.domain,
            probe_port=9001,
            memory=MemoryService(node=host.name, host=host.name, port=9000, token="token"),
        )
        #: Whether the next input kills it before its memory is written, or after how many of that input's actions.
        self.crash_before_memory = False
        self.crash_after_actions = -1
        outbox = Outbox(host.name, self.boot, host.clock.wall_us)
        super().__init__(config, host.disk.memory, outbox, HostSigns(host.clock, host.launched))
        self.log = Endpoint(host.server, host.link, host.checker.acknowledged)
        self.log.crash = self.crash
        self._workers: dict[str, tuple[Process, Pipe[FromWorker], Pipe[ToWorker]]] = {}
        self._fork_server: SimulatedForkServer | None = None
        self._lines: tuple[Pipe[ToForkServer], Pipe[FromForkServer]] | None = None
        #: Copies in progress, with the peers to copy to.
        self._copies: dict[tuple[str, int], tuple[MemoryService, ...]] = {}
        self._prober = SimulatedProber(host.loop, host.name, host.training, self.feed)
        self._names = DuplicateAgents(self.boot, host.disk.previous_boot, host.heartbeat_s)
        self._stop_hearing = host.beats.listen_to(host.name, host.link, self._hear_beat)
        self._serving = host.loop.create_task(self._serve_log())
        host.loop.call_later(host.rng.uniform(0.05, 0.3), self._connect)

    # --- the ports of the shell ------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Check that it has neither been killed nor ended."""
        return not self.closed

    def now_us(self) -> int:
        """Return the machine's own wall clock, which may be wrong; see Shell."""
        return self.host.clock.wall_us()

    def remember(self, memory: Remembered) -> None:
        """Write the memory, or crash in place of the write; see Shell."""
        if self.crash_before_memory:
            self.crash_before_memory = False
            self.crash()
        else:
            self.host.disk.write(memory)

    def core_failed(self, agent_input: Input) -> None:
        """Raise the core's exception again: a simulation ends with it."""
        raise

    def acting(self, agent_input: Input, actions: Sequence[Action]) -> Sequence[Action]:
        """Show the actions to the checker, and return them; see Shell."""
        if self.alive:
            self.host.checker.agent_acts(self.host, agent_input, actions)
        return actions

    def may_act(self, number: int) -> bool:
        """Return False once the agent has crashed; it may crash here, after the ordered number of actions. See
        Shell."""
        if self.crash_after_actions == number:
            self.crash_after_actions = -1
            self.crash()
        return self.alive

    def tell_worker(self, worker: str, message: ToWorker) -> None:
        """Send the message, where the worker is connected; see Shell."""
        if worker in self._workers:
            self._workers[worker][2].send(message)

    def tell_fork_server(self, message: ToForkServer) -> None:
        """Send the message, unless the fork server's inventory has not arrived yet; see Shell."""
        if self._lines is not None and self.has_inventory.is_set():
            self._lines[0].send(message)

    def copy(self, order: CopyState) -> None:
        """Start a copy, which takes 0.01 to 0.3 s; a newer order during it changes only the peers. See Shell."""
        key = (order.task, order.shard)
        if key not in self._copies:
            self.host.loop.call_later(self.host.rng.uniform(0.01, 0.3), self._copy, *key)
        self._copies[key] = order.peers

    def inject_into_node(self, order: InjectIntoNode) -> None:
        """Inject an ordered fault; see agents/health/node_faults.py."""
        reason = "no accelerator is watched here"
        if order.fault.kind == "kill":
            self._end_fork_server()
            self.crash()
            return
        if order.fault.kind == "drop_network":
            self.host.drop_network(order.fault.seconds)
            reason = ""
        self.feed(NodeFaultInjected(command_id=order.command_id, reason=reason))

    def check(self, order: RunCheck) -> None:
        """Start a health check, which takes the host's `check_s` seconds; see Shell."""
        self.host.loop.call_later(self.host.check_s, self._checked, order.command_id)

    def probe(self, order: ProbeLinks) -> None:
        """Probe the links to the peers; see Shell."""
        self._prober.probe(order)

    def take_stacks(self, order: TakeStacks) -> None:
        """Tell the stacks after a moment; see Shell."""
        stacks = tuple(WorkerStack(worker=worker) for worker in order.processes)
        event = StacksTaken(node=self.host.name, task=order.task, generation=order.generation, workers=stacks)
        self.host.loop.call_later(self.host.rng.uniform(0.0, 2.0), self.feed, event)

    def disconnect(self, worker: str, reason: str) -> None:
        """Close the worker's connection; see Shell."""
        self._drop_worker(worker)

    def finish(self) -> None:
        """End the agent; see Shell. After a command to leave for good a person starts it again, a little later."""
        if self.state.ends == "for good":
            self.host.has_left = True
            self.host.loop.call_later(3.0, self.host.let_run)
        self.host.loop.create_task(self._finish())

    def snapshots(self) -> Iterable[SnapshotStored]:
        """Return the states in the fork server's memory; see Shell."""
        return self._fork_server.memory.holdings(self.host.name) if self._fork_server is not None else ()

    def superseded(self, boot: int) -> None:
        """Note a later agent of this name in the log; see Shell."""
        self._names.note_logged(boot, self.host.loop.time())

    def _checked(self, command_id: str) -> None:
        """Report the result of a health check; see agents/health/health_check.py."""
        took_us, is_unhealthy = int(self.host.check_s * 1e6), self.host.is_unhealthy
        detail = "it is ill" if is_unhealthy else "found nothing wrong"
        self.feed(Checked(command_id=command_id, has_passed=not is_unhealthy, duration_us=took_us, detail=detail))

    def _copy(self, task: str, shard: int) -> None:
        """Push the newest state of the shard to the first peer that accepts it."""
        peers = self._copies.pop((task, shard))
        copies = self._fork_server.memory.copies_of(task, shard) if self.alive and self._fork_server is not None else ()
        if copies:
            any(self.host.training.push(self.host.name, peer, task, shard, copies[0]) for peer in peers)

    # --- ends ------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Kill the agent (SIGKILL)."""
        if not self.alive:
            return
        self.closed = True
        self._stop_hearing()
        self._serving.cancel()
        self.close()
        for process, outgoing, incoming in list(self._workers.values()):
            outgoing.close()
            incoming.close()
            process.disconnect()
        self._drop_fork_server()
        self.host.agent_ended(self)

    def terminate(self, grace_s: float) -> None:
        """Handle SIGTERM: the node is drained, then the agent ends; the supervisor starts the next one."""
        self.feed(Drain(reason="its agent was asked to end", limit_s=grace_s / 2))

    async def hand_over(self) -> None:
        """Handle SIGTERM where the next agent takes over: close the sums, send what the outbox holds, end."""
        self.feed(HandOver())
        await self.outbox.drained(2.0)
        self.crash()

    def leave(self) -> None:
        """Handle SIGINT: the node is to leave the cluster; it stays away until a person starts it again."""
        self.host.has_left = True
        self.feed(LeaveNow(reason="requested by an operator"))

    async def _finish(self) -> None:
        await self.outbox.drained(5.0)
        self._end_fork_server()
        self.crash()

    def _end_fork_server(self) -> None:
        if self._fork_server is not None:
            self._fork_server.die()

    # --- the fork server -------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to a living fork server, or have one started."""
        if not self.alive or self._lines is not None:
            return
        server = self.host.fork_server
        if server is None or not server.alive:
            self.host.start_fork_server()
            self.host.loop.call_later(0.1, self._connect)
            return
        loop, rng = self.host.loop, self.host.rng
        to_server: Pipe[ToForkServer] = Pipe(loop, rng, server.handle)
        to_agent: Pipe[FromForkServer] = Pipe(loop, rng, self.fork_server_said)
        self._fork_server, self._lines = server, (to_server, to_agent)
        self.has_inventory.clear()
        server.connect(to_agent)

    def lose_fork_server(self, *, has_died: bool) -> None:
        """Handle that the connection broke, or that the process has ended."""
        if self._lines is not None:
            self._drop_fork_server()
            if has_died:
                self.host.loop.call_later(0.01, self.feed, ForkServerDied())
            self.host.loop.call_later(self.host.rng.uniform(0.02, 0.2), self._connect)

    def _drop_fork_server(self) -> None:
        if self._lines is not None and self._fork_server is not None:
            for pipe in self._lines:
                pipe.close()
            self._fork_server.lose_agent(self._lines[1])
            self._lines = None
            self.has_inventory.clear()

    # --- workers ---------------------------------------------------------------------------------

    def accept(self, process: Process) -> Pipe[FromWorker]:
        """Accept a worker's connection, and return the pipe to the agent; the newest connection of a worker counts."""
        loop, rng, worker = self.host.loop, self.host.rng, process.worker

        def take(message: FromWorker) -> None:
            """Feed a message of the worker."""
            if isinstance(message, Hello):
                self.worker_connected(message)
            else:
                self.feed(WorkerSaid(worker=worker, message=message, now_us=int(loop.time() * 1e6)))

        to_agent: Pipe[FromWorker] = Pipe(loop, rng, take)
        to_worker: Pipe[ToWorker] = Pipe(loop, rng, process.receive)
        self._workers[worker] = (process, to_agent, to_worker)
        return to_agent

    def worker_ended(self, worker: str) -> None:
        """Handle that a worker's process has ended, and its connection with it."""
        if worker in self._workers:
            _, to_agent, to_worker = self._workers.pop(worker)
            # Its messages are in the socket already: they are read before the end of the stream.
            self.host.loop.call_later(0.002, to_agent.close)
            to_worker.close()
            self.host.loop.call_later(0.003, self._disconnected, worker)

    def break_worker_line(self, worker: str) -> None:
        """Break the worker's connection though both ends live."""
        self._drop_worker(worker)
        self._disconnected(worker)

    def _drop_worker(self, worker: str) -> None:
        if worker in self._workers:
            process, to_agent, to_worker = self._workers.pop(worker)
            to_agent.close()
            to_worker.close()
            process.disconnect()

    def _disconnected(self, worker: str) -> None:
        if worker not in self._workers:
            self.feed(WorkerDisconnected(worker=worker))

    # --- the log ---------------------------------------------------------------------------------

    async def _serve_log(self) -> None:
        """Run everything that needs the log."""
        await self.log.last_seq()
        self.outbox.schema = self._coordinator_reads()
        self._look_for_duplicates()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_beats())
            await until_alone(self._names, self.has_inventory, self.host.loop.time)
            feed = _Readable(self.host.server, self.host.link, self.host.name, self.schema)
            await feed.follow(self.tasks_here())
            self.feed(LogSeen(created="the log"))
            group.create_task(self._keep_looking())
            group.create_task(self.outbox.run(self.log))
            group.create_task(self._take_commands(feed))

    # --- duplicates of its name (agents/shell/duplicate_agent.py) --------------------------------------------

    def _hear_beat(self, boot: int) -> None:
        self._names.note_beat(boot, self.host.loop.time())
        if self.alive and self._names.newer:
            self.host.superseded = True
            self._end_fork_server()
            self.crash()

    def _look_for_duplicates(self) -> None:
        for boot in (self.host.beats.last_boot.get(self.host.name), self.host.checker.joined.get(self.host.name)):
            if boot is not None:
                self._names.note_logged(boot, self.host.loop.time())

    async def _keep_looking(self) -> None:
        """Look for other agents of this name. The real one looks at each new connection; here none is announced."""
        while True:
            if self.host.shares_name and not self.host.link.cut and self.host.server.up:
                self._look_for_duplicates()
            if self._names.outrun:
                await asyncio.sleep(self._names.silence_s)
                if self._names.newer:
                    return  # it has ended by that
                self.host.disk.boot = max(self.host.disk.boot, self._names.outrun)
                self.crash()
                return
            await asyncio.sleep(5.0)

    def _coordinator_reads(self) -> int:
        """Return the schema that the coordinator reads; see events/nats/terms.py. An agent learns it within a beat."""
        started = self.host.server.newest_start
        return min(self.schema, spoken_schema(started.version)) if started else FIRST

    async def _send_beats(self) -> None:
        beats = BeatEnd(self.host.beats, self.host.link, self.heard_own_beat)
        await self.has_inventory.wait()
        while True:
            await beats.publish(self.beat(load_milli=0, memory_free_bytes=0))
            self.outbox.schema = self._coordinator_reads()
            await asyncio.sleep(self.host.heartbeat_s)

    async def _take_commands(self, feed: CommandEnd) -> None:
        await self.has_joined.wait()
        await self.take_entries(feed)


class _Readable(CommandEnd):
    """The feed as an agent of some schema reads it."""

    def __init__(self, server: LogServer, link: Link, node: str, schema: int) -> None:
        super().__init__(server, link, node)
        self._schema = schema

    async def read(self) -> AsyncGenerator[RecordedEvent, None]:
        """Yield the entries; what the agent cannot read it skips in silence. See CommandFeed."""
        async with aclosing(super().read()) as entries:
            async for recorded in entries:
                if schema_of(recorded.envelope.event) <= self._schema:
                    yield recorded
