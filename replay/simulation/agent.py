"""The agent in virtual time: the real core, shell (agents/shell.py) and outbox, on modelled lines.

It may be killed anywhere: before the memory is written, after it, between two actions, around an append.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from agents.agent_config import Config
from agents.namesakes import Namesakes, until_alone
from agents.outbox import Outbox
from agents.protocol.messages import FromForkServer, FromWorker, Hello, ToForkServer, ToWorker
from agents.shell import Shell
from agents.state import (
    Action,
    Checked,
    CopyState,
    Drain,
    ForkServerDied,
    HandOver,
    Held,
    InjectIntoNode,
    Input,
    Leave,
    LogSeen,
    NodeFaultInjected,
    Remembered,
    RunCheck,
    WorkerDisconnected,
    WorkerSaid,
)
from events.envelope import Recorded
from events.schemas import FIRST, schema_of, spoken_schema, told_version
from events.vocabulary import MemoryService
from replay.simulation.log_client import BeatEnd, CommandEnd, Endpoint
from replay.simulation.log_server import LogServer
from replay.simulation.network import Link, Pipe
from replay.simulation.process import Process
from replay.simulation.progress import HostSigns

if TYPE_CHECKING:
    from replay.simulation.fork_server import ForkServer
    from replay.simulation.host import Host


class Agent(Shell):
    """One life of a node's agent."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.boot = host.disk.next_boot(host.clock.wall_us())
        self.schema = host.schema
        config = Config(
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
            memory=MemoryService(node=host.name, host=host.name, port=9000, token="token"),
        )
        #: Feeds until it is killed: before its memory is written, or after so many of the actions of that turn.
        self.crash_before_memory = False
        self.crash_after_actions = -1
        outbox = Outbox(host.name, self.boot, host.clock.wall_us)
        super().__init__(config, host.disk.memory, outbox, HostSigns(host))
        self.log = Endpoint(host.server, host.link, host.witness.acknowledged)
        self.log.crash = self.crash
        self._workers: dict[str, tuple[Process, Pipe[FromWorker], Pipe[ToWorker]]] = {}
        self._fork_server: ForkServer | None = None
        self._lines: tuple[Pipe[ToForkServer], Pipe[FromForkServer]] | None = None
        #: Copies under way, and where to.
        self._copies: dict[tuple[str, int], tuple[MemoryService, ...]] = {}
        self._names = Namesakes(self.boot, host.disk.previous_boot, host.heartbeat_s)
        self._stop_hearing = host.beats.listen_to(host.name, host.link, self._hear_beat)
        self._serving = host.loop.create_task(self._serve_log())
        host.loop.call_later(host.drawn.uniform(0.05, 0.3), self._connect)

    # --- the ports of the shell ------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """It has not been killed, and has not ended."""
        return not self.closed

    def now_us(self) -> int:
        """See Shell: the machine's own wall clock, which may be wrong."""
        return self.host.clock.wall_us()

    def remember(self, memory: Remembered) -> None:
        """See Shell. A crash may come in place of the write."""
        if self.crash_before_memory:
            self.crash_before_memory = False
            self.crash()
        else:
            self.host.disk.write(memory)

    def core_failed(self, given: Input) -> None:
        """Raises the core's exception anew: a simulation ends with it."""
        raise  # loud: a simulation ends with it

    def acting(self, given: Input, actions: Sequence[Action]) -> Sequence[Action]:
        """See Shell. The witness sees the actions first."""
        if self.alive:
            self.host.witness.agent_acts(self.host, given, actions)
        return actions

    def may_act(self, number: int) -> bool:
        """See Shell. False once the agent has crashed; it may crash here, after the ordered number of actions."""
        if self.crash_after_actions == number:
            self.crash_after_actions = -1
            self.crash()
        return self.alive

    def tell_worker(self, worker: str, message: ToWorker) -> None:
        """See Shell."""
        if worker in self._workers:
            self._workers[worker][2].send(message)

    def tell_fork_server(self, message: ToForkServer) -> None:
        """See Shell. Nothing goes out before the fork server's inventory has come in."""
        if self._lines is not None and self.has_inventory.is_set():
            self._lines[0].send(message)

    def copy(self, order: CopyState) -> None:
        """See Shell. The copy takes 0.01 to 0.3 s; a newer order during it changes only the peers."""
        key = (order.task, order.shard)
        if key not in self._copies:
            self.host.loop.call_later(self.host.drawn.uniform(0.01, 0.3), self._copy, *key)
        self._copies[key] = order.peers

    def inject_into_node(self, order: InjectIntoNode) -> None:
        """See agents/node_faults.py."""
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
        """See Shell. The check takes the host's `check_s` seconds."""
        self.host.loop.call_later(self.host.check_s, self._checked, order.command_id)

    def disconnect(self, worker: str, why: str) -> None:
        """See Shell."""
        self._drop_worker(worker)

    def finish(self) -> None:
        """See Shell. One that was told to leave for good is started by a person, a little later."""
        if self.state.ends == "for good":
            self.host.has_left = True
            self.host.loop.call_later(3.0, self.host.let_run)
        self.host.loop.create_task(self._finish())

    def held_states(self) -> Iterable[Held]:
        """See Shell."""
        return self._fork_server.memory.held() if self._fork_server is not None else ()

    def outlived(self, boot: int) -> None:
        """See Shell."""
        self._names.stands_in_the_log(boot, self.host.loop.time())

    def _checked(self, command_id: str) -> None:
        """See agents/health.py."""
        took_us, ill = int(self.host.check_s * 1e6), self.host.ill
        detail = "it is ill" if ill else "found nothing wrong"
        self.feed(Checked(command_id=command_id, passed=not ill, duration_us=took_us, detail=detail))

    def _copy(self, task: str, shard: int) -> None:
        """The newest state of the shard, to the first peer that takes it."""
        peers = self._copies.pop((task, shard))
        kept = self._fork_server.memory.of(task, shard) if self.alive and self._fork_server is not None else ()
        if kept:
            any(self.host.training.push(self.host, peer, task, shard, kept[0]) for peer in peers)

    # --- ends ------------------------------------------------------------------------------------

    def crash(self) -> None:
        """SIGKILL."""
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
        """SIGTERM: the node is drained, then the agent ends; the supervisor starts the next one."""
        self.feed(Drain(reason="its agent was asked to end", limit_s=grace_s / 2))

    async def hand_over(self) -> None:
        """SIGTERM of one that hands over: close the sums, send what the outbox holds, go."""
        self.feed(HandOver())
        await self.outbox.drained(2.0)
        self.crash()

    def leave(self) -> None:
        """SIGINT: the node is to leave the cluster; it stays away until somebody lets it run again."""
        self.host.has_left = True
        self.feed(Leave(reason="requested by an operator"))

    async def _finish(self) -> None:
        await self.outbox.drained(5.0)
        self._end_fork_server()
        self.crash()

    def _end_fork_server(self) -> None:
        if self._fork_server is not None:
            self._fork_server.die()

    # --- the fork server -------------------------------------------------------------------------

    def _connect(self) -> None:
        """Find a living fork server, or have one started."""
        if not self.alive or self._lines is not None:
            return
        server = self.host.fork_server
        if server is None or not server.alive:
            self.host.start_fork_server()
            self.host.loop.call_later(0.1, self._connect)
            return
        loop, drawn = self.host.loop, self.host.drawn
        to_server: Pipe[ToForkServer] = Pipe(loop, drawn, server.obey)
        to_agent: Pipe[FromForkServer] = Pipe(loop, drawn, self.fork_server_said)
        self._fork_server, self._lines = server, (to_server, to_agent)
        self.has_inventory.clear()
        server.connect(to_agent)

    def lose_fork_server(self, *, has_died: bool) -> None:
        """The line broke; or the process has ended."""
        if self._lines is not None:
            self._drop_fork_server()
            if has_died:
                self.host.loop.call_later(0.01, self.feed, ForkServerDied())
            self.host.loop.call_later(self.host.drawn.uniform(0.02, 0.2), self._connect)

    def _drop_fork_server(self) -> None:
        if self._lines is not None and self._fork_server is not None:
            for pipe in self._lines:
                pipe.close()
            self._fork_server.lose_agent(self._lines[1])
            self._lines = None
            self.has_inventory.clear()

    # --- workers ---------------------------------------------------------------------------------

    def accept(self, process: Process) -> Pipe[FromWorker]:
        """A worker connects; the newest connection of a worker counts."""
        loop, drawn, worker = self.host.loop, self.host.drawn, process.worker

        def take(message: FromWorker) -> None:
            if isinstance(message, Hello):
                self.worker_connected(message)
            else:
                self.feed(WorkerSaid(worker=worker, message=message))

        to_agent: Pipe[FromWorker] = Pipe(loop, drawn, take)
        to_worker: Pipe[ToWorker] = Pipe(loop, drawn, process.hear)
        self._workers[worker] = (process, to_agent, to_worker)
        return to_agent

    def worker_gone(self, worker: str) -> None:
        """A worker's process has ended, and its connection with it."""
        if worker in self._workers:
            _, to_agent, to_worker = self._workers.pop(worker)
            # What it had sent is in the socket already: it is read before the end of the stream is seen.
            self.host.loop.call_later(0.002, to_agent.close)
            to_worker.close()
            self.host.loop.call_later(0.003, self._disconnected, worker)

    def break_worker_line(self, worker: str) -> None:
        """The connection breaks though both ends live."""
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
        """Everything that needs the log."""
        await self.log.last_seq()
        self.outbox.schema = self._coordinator_reads()
        self._look_for_namesakes()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_beats())
            await until_alone(self._names, self.has_inventory, self.host.loop.time)
            feed = _Readable(self.host.server, self.host.link, self.host.name, self.schema)
            await feed.follow(self.tasks_here())
            self.feed(LogSeen(identity="the log"))
            group.create_task(self._keep_looking())
            group.create_task(self.outbox.run(self.log))
            group.create_task(self._take_commands(feed))

    # --- others of its name (agents/namesakes.py) ------------------------------------------------

    def _hear_beat(self, boot: int) -> None:
        self._names.heard(boot, self.host.loop.time())
        if self.alive and self._names.newer:
            self.host.superseded = True
            self._end_fork_server()
            self.crash()

    def _look_for_namesakes(self) -> None:
        for boot in (self.host.beats.last_boot.get(self.host.name), self.host.witness.joined.get(self.host.name)):
            if boot is not None:
                self._names.stands_in_the_log(boot, self.host.loop.time())

    async def _keep_looking(self) -> None:
        """The real one looks at each new connection; here no end of a connection is announced."""
        while True:
            is_shared = self.host.is_twin or self.host.twin is not None
            if is_shared and not self.host.link.cut and self.host.server.up:
                self._look_for_namesakes()
            if self._names.outrun:
                await asyncio.sleep(self._names.silence_s)
                if self._names.newer:
                    return  # it has ended by that
                self.host.disk.boot = max(self.host.disk.boot, self._names.outrun)
                self.crash()
                return
            await asyncio.sleep(5.0)

    def _coordinator_reads(self) -> int:
        """See events/nats_terms.py; it is heard of within a beat."""
        started = self.host.server.newest_started
        return min(self.schema, spoken_schema(started.version)) if started else FIRST

    async def _send_beats(self) -> None:
        beats = BeatEnd(self.host.beats, self.host.link)
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

    async def read(self) -> AsyncGenerator[Recorded, None]:
        """See CommandFeed. What the agent cannot read it skips in silence."""
        async with aclosing(super().read()) as entries:
            async for recorded in entries:
                if schema_of(recorded.envelope.event) <= self._schema:
                    yield recorded
