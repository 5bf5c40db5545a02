"""The agent's shell in virtual time: the real core (agents/core.py) and the real outbox, on modelled lines.

Rules (those of agents/daemon.py)
---------------------------------
* Every input goes through `feed`; the memory is written before the actions are done.
* It may be killed anywhere: before the memory is written, after it, between two actions, around an append.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agents import core
from agents.namesakes import WAIT_MAX_S, Namesakes
from agents.outbox import Outbox
from agents.state import (
    Action,
    Append,
    Appended,
    ArmTimer,
    Checked,
    Commanded,
    Config,
    CopyState,
    Disconnect,
    Finish,
    ForkServerDied,
    ForkServerSaid,
    HandOver,
    Input,
    Leave,
    LogSeen,
    RunCheck,
    Stalled,
    StateHeld,
    StrikeNode,
    Struck,
    TellForkServer,
    TellWorker,
    TimerFired,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from agents.trainer.messages import Exited, FromForkServer, FromWorker, Hello, Inventory, ToForkServer, ToWorker
from agents.watch import Watch
from events.envelope import Envelope
from events.schemas import FIRST, schema_of, spoken_schema, told_version
from events.vocabulary import Command, Fault, Heartbeat, MemoryService, NodeJoined
from replay.simulation.log_client import BeatEnd, CommandEnd, Endpoint
from replay.simulation.network import Pipe
from replay.simulation.process import Process
from replay.simulation.progress import HostSigns

if TYPE_CHECKING:
    from replay.simulation.fork_server import ForkServer
    from replay.simulation.host import Host


class Agent:
    """One life of a node's agent."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.alive = True
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
            memory=MemoryService(node=host.name, host=host.name, port=9000, token="token"),
        )
        #: Feeds until it is killed: before its memory is written, or after so many of the actions of that turn.
        self.crash_before_memory = False
        self.crash_after_actions = -1
        self.state = core.resume(config, host.disk.memory)
        self.log = Endpoint(host.server, host.link, host.witness.acknowledged)
        self.log.crash = self.crash
        self._outbox = Outbox(host.name, self.boot, host.clock.wall_us)
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._workers: dict[str, tuple[Process, Pipe[FromWorker], Pipe[ToWorker]]] = {}
        self._fork_server: ForkServer | None = None
        self._lines: tuple[Pipe[ToForkServer], Pipe[FromForkServer]] | None = None
        self._watch = Watch(
            HostSigns(host),
            lambda worker, mark, still_us, stopped, times: self.feed(
                Stalled(worker=worker, mark=mark, still_us=still_us, stopped=stopped, times=times)
            ),
        )
        #: Copies under way, and where to.
        self._copies: dict[tuple[str, int], tuple[MemoryService, ...]] = {}
        self._names = Namesakes(self.boot, host.disk.previous_boot, host.heartbeat_s)
        self._stop_hearing = host.beats.listen_to(host.name, host.link, self._hear_beat)
        self._has_inventory = asyncio.Event()
        self._has_joined = asyncio.Event()
        self._beat = 0
        self._serving = host.loop.create_task(self._serve_log())
        host.loop.call_later(host.drawn.uniform(0.05, 0.3), self._connect)

    # --- the one way in and the one way out ------------------------------------------------------

    def feed(self, given: Input) -> None:
        """Let the core handle one input, write down what the next agent must know, do what the core asks for."""
        if not self.alive:
            return
        before = self.state
        self.state, actions = core.handle(before, given)
        if self.crash_before_memory and self.state.memory is not before.memory:
            self.crash_before_memory = False
            self.crash()
            return
        if self.state.memory is not before.memory:
            self.host.disk.write(self.state.memory)
        self.host.witness.agent_acts(self.host, given, actions)
        self._do_all(actions)

    def _do_all(self, actions: Sequence[Action]) -> None:
        for done, action in enumerate(actions):
            if self.crash_after_actions == done:
                self.crash_after_actions = -1
                self.crash()
            if not self.alive:
                return
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Append(event=event, caused_by=caused_by, confirm=confirm):
                on_durable = (lambda: self.feed(Appended(event=event))) if confirm else None
                self._outbox.put(event, caused_by=caused_by, on_durable=on_durable)
                if isinstance(event, NodeJoined):
                    self._has_joined.set()
            case TellWorker(worker=worker, message=to_worker):
                if worker in self._workers:
                    self._workers[worker][2].send(to_worker)
            case TellForkServer(message=to_fork_server):
                if self._lines is not None and self._has_inventory.is_set():
                    self._lines[0].send(to_fork_server)
            case ArmTimer(name=name, key=key, after_s=after_s):
                if running := self._timers.pop((name, key), None):
                    running.cancel()
                fired = TimerFired(name=name, key=key)
                self._timers[name, key] = self.host.loop.call_later(after_s, self._fire, fired)
            case CopyState(task=task, shard=shard, peers=peers):
                if (task, shard) not in self._copies:
                    self.host.loop.call_later(self.host.drawn.uniform(0.01, 0.3), self._copy, task, shard)
                self._copies[task, shard] = peers
            case StrikeNode(fault=fault, command_id=command_id):
                self._strike(fault, command_id)
            case RunCheck(command_id=command_id):
                self.host.loop.call_later(self.host.check_s, self._checked, command_id)
            case Disconnect(worker=worker):
                self._drop_worker(worker)
            case Finish():
                self.host.loop.create_task(self._finish())
            case _:
                # Loud: whatever comes up in a simulation needs its part of the model.
                raise NotImplementedError(f"the simulated agent has no part for {type(action).__name__}")

    def _strike(self, fault: Fault, command_id: str) -> None:
        """See agents/node_faults.py."""
        if fault.kind == "kill":
            if self._fork_server is not None:
                self._fork_server.die()
            self.crash()
            return
        reason = "no accelerator is watched here"
        if fault.kind == "drop_network":
            self.host.drop_network(fault.seconds)
            reason = ""
        self.feed(Struck(command_id=command_id, reason=reason))

    def _checked(self, command_id: str) -> None:
        """See agents/health.py."""
        took_us, ill = int(self.host.check_s * 1e6), self.host.ill
        detail = "it is ill" if ill else "nothing wrong was found"
        self.feed(Checked(command_id=command_id, passed=not ill, duration_us=took_us, detail=detail))

    def _copy(self, task: str, shard: int) -> None:
        """The newest state of the shard, to the first peer that takes it."""
        peers = self._copies.pop((task, shard))
        kept = self._fork_server.memory.of(task, shard) if self.alive and self._fork_server is not None else ()
        if kept:
            any(self.host.training.push(self.host, peer, task, shard, kept[0]) for peer in peers)

    def _fire(self, fired: TimerFired) -> None:
        self._timers.pop((fired.name, fired.key), None)
        self.feed(fired)

    # --- ends ------------------------------------------------------------------------------------

    def crash(self) -> None:
        """SIGKILL."""
        if not self.alive:
            return
        self.alive = False
        self._stop_hearing()
        self._serving.cancel()
        self._watch.close()
        for timer in self._timers.values():
            timer.cancel()
        for process, outgoing, incoming in list(self._workers.values()):
            outgoing.close()
            incoming.close()
            process.disconnect()
        self._drop_fork_server()
        self.host.agent_ended(self)

    async def hand_over(self) -> None:
        """SIGTERM: close the sums, send what the outbox holds, go."""
        self.feed(HandOver())
        await self._outbox.drained(2.0)
        self.crash()

    def leave(self) -> None:
        """SIGINT: the node is to leave the cluster; it stays away until somebody lets it run again."""
        self.host.has_left = True
        self.feed(Leave(reason="a person asked for it"))

    async def _finish(self) -> None:
        await self._outbox.drained(5.0)
        if self._fork_server is not None:
            self._fork_server.die()
        self.crash()

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
        to_agent: Pipe[FromForkServer] = Pipe(loop, drawn, self._fork_server_said)
        self._fork_server, self._lines = server, (to_server, to_agent)
        self._has_inventory.clear()
        server.connect(to_agent)

    def _fork_server_said(self, message: FromForkServer) -> None:
        if isinstance(message, Inventory):
            self._has_inventory.set()
        mark = self._watch.drop(message.worker) if isinstance(message, Exited) else None
        self.feed(ForkServerSaid(message=message, mark=mark))
        if isinstance(message, Inventory) and self.alive:
            for entry in message.workers:
                self._watch.follow(entry.worker, entry.pid)
        if isinstance(message, Inventory) and self._fork_server is not None:
            for held in list(self._fork_server.memory.held()):
                self.feed(StateHeld(held=held))

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
            self._has_inventory.clear()

    # --- workers ---------------------------------------------------------------------------------

    def accept(self, process: Process) -> Pipe[FromWorker]:
        """A worker connects; the newest connection of a worker counts."""
        loop, drawn, worker = self.host.loop, self.host.drawn, process.worker

        def take(message: FromWorker) -> None:
            if isinstance(message, Hello):
                self.feed(WorkerConnected(hello=message))
                if self.alive and worker in self.state.memory.workers:
                    self._watch.follow(worker, process.pid)
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
        self._outbox.schema = self._coordinator_reads()
        self._look_for_namesakes()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_beats())
            await self._alone()
            self.feed(LogSeen(identity="the log"))
            group.create_task(self._keep_looking())
            group.create_task(self._outbox.run(self.log))
            group.create_task(self._take_commands())

    # --- others of its name (agents/namesakes.py) ------------------------------------------------

    def _hear_beat(self, boot: int) -> None:
        self._names.heard(boot, self.host.loop.time())
        if self.alive and self._names.newer:
            self.host.superseded = True
            if self._fork_server is not None:
                self._fork_server.die()
            self.crash()

    def _look_for_namesakes(self) -> None:
        for boot in (self.host.beats.last_boot.get(self.host.name), self.host.witness.joined.get(self.host.name)):
            if boot is not None:
                self._names.stands_in_the_log(boot, self.host.loop.time())

    async def _alone(self) -> None:
        if self._names.is_older_there(self.host.loop.time()):
            await self._has_inventory.wait()
            until_s = self.host.loop.time() + WAIT_MAX_S
            while self._names.is_older_there(now_s := self.host.loop.time()) and now_s < until_s:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def _keep_looking(self) -> None:
        """The real one looks at each new connection; here no end of a connection is announced."""
        while True:
            is_shared = self.host.is_twin or self.host.twin is not None
            if is_shared and not self.host.link.cut and self.host.server.up:
                self._look_for_namesakes()
            if self._names.outrun:
                await asyncio.sleep(self._names.silence_s)
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
        await self._has_inventory.wait()
        while True:
            self._beat += 1
            beat = Heartbeat(
                node=self.host.name,
                agent_boot=self.boot,
                beat=self._beat,
                workers=len(self.state.memory.workers),
                load_milli=0,
                memory_free_bytes=0,
            )
            at_us = self.host.clock.wall_us()
            await beats.publish(
                Envelope(producer=self.host.name, boot=self.boot, number=self._beat, observed_at_us=at_us, event=beat)
            )
            self._outbox.schema = self._coordinator_reads()
            await asyncio.sleep(self.host.heartbeat_s)

    async def _take_commands(self) -> None:
        await self._has_joined.wait()
        async for recorded in CommandEnd(self.host.server, self.host.link, self.host.name).read():
            envelope = recorded.envelope
            assert isinstance(envelope.event, Command)
            if schema_of(envelope.event) > self.schema:
                continue  # an agent of schema 1 skips what it cannot read, in silence
            age_s = max(0.0, (self.host.clock.wall_us() - recorded.recorded_at_us) / 1e6)
            self.feed(Commanded(command=envelope.event, term=envelope.term, cause=envelope.event_id, age_s=age_s))
            if not self.alive:  # the command is not acknowledged: the next agent gets it again
                return
