"""One node of the soak: the real agent around light workers."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from unicrond.agents.core.agent_config import AgentConfig
from unicrond.agents.core.state import (
    Checked,
    CopyState,
    InjectIntoNode,
    Input,
    LogSeen,
    NodeFaultInjected,
    Remembered,
    RunCheck,
    TakeStacks,
    WorkerSaid,
)
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import (
    GroupMembership,
    Hello,
    Inventory,
    IterationCommitted,
    Kill,
    ProcessExited,
    ProcessForked,
    Quit,
    Reporter,
    Spawn,
    ToForkServer,
    ToWorker,
)
from unicrond.agents.shell.outbox import Outbox
from unicrond.agents.shell.shell import Shell
from unicrond.events.log.event_log import Fence
from unicrond.events.nats.commands import NatsCommandFeed
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.terms import Terms
from unicrond.events.vocabulary import (
    CoordinatorStarted,
    MemoryService,
    ProbeLinks,
    SnapshotStored,
    TaskSpec,
    WorkerJoinedGroup,
    WorkerPaused,
    WorkerReady,
)
from unicrond.events.wire.envelope import Entry, Envelope
from unicrond.events.wire.schemas import SCHEMA, spoken_schema, told_version

#: (task, generation, urgent, members, nodes of these): of a membership that workers here were told.
Told = tuple[str, int, bool, int, int]
_pids = itertools.count(1000)


class Clock:
    """All workers of a task are at the same iteration, as the clock says: they meet without a word."""

    def __init__(self, iteration_s: float, kept_every_s: float) -> None:
        self.iteration_s = iteration_s
        self.kept_every_s = kept_every_s

    def iteration(self) -> int:
        """The last one that is committed. Of the wall clock, which processes share; from 1 on."""
        return int((time.time() - 1_700_000_000) / self.iteration_s)


class Worker:
    """A light worker: it has no model and no peers, and does what it is told at once."""

    def __init__(self, node: Node, spawn: Spawn) -> None:
        self.node = node
        self.name = spawn.launch.worker
        self.spec: TaskSpec = spawn.launch.spec
        self.slot = spawn.slot
        self.pid = next(_pids)
        self.membership: GroupMembership | None = None
        self.told = 0
        self.was_member = False
        self._committed = 0

    @property
    def task(self) -> str:
        return self.spec.name

    @property
    def leads(self) -> bool:
        return self.membership is not None and self.membership.members[0].worker == self.name

    def hear(self, message: ToWorker) -> None:
        if isinstance(message, Quit):
            self.node.ended(self, 0)
        elif isinstance(message, GroupMembership) and message.generation > self.told:
            self.told = message.generation
            if any(member.worker == self.name for member in message.members):
                self._follow(message)
            elif self.was_member:
                self.membership = None
                self.say(
                    WorkerPaused(**self.reporter, generation=message.generation, iteration=self.node.clock.iteration())
                )

    def _follow(self, membership: GroupMembership) -> None:
        source: Any = "own"
        if not self.was_member:
            source = "init" if len(membership.joiners) == len(membership.members) else "replica"
        self.membership, self.was_member = membership, True
        iteration = self.node.clock.iteration() + 1
        self._committed = iteration - 1
        self.say(
            WorkerJoinedGroup(
                **self.reporter,
                generation=membership.generation,
                iteration=iteration,
                micro_batches_assigned=0,
                duration_us=1000,
                source=source,
            )
        )
        self.node.on_regrouped(self, membership)

    def commit(self) -> None:
        """As the lead: what the clock says is done since the last time."""
        membership, iteration = self.membership, self.node.clock.iteration()
        if membership is None or iteration <= self._committed:
            return
        first, self._committed = self._committed + 1, iteration
        count = len(membership.members)
        dealt = self.spec.global_batch // self.spec.micro_batch
        shares = tuple(dealt // count + (rank < dealt % count) for rank in range(count))
        for each in range(first, iteration + 1):
            self.say(
                IterationCommitted(
                    generation=membership.generation,
                    iteration=each,
                    samples=self.spec.global_batch,
                    samples_digest=each,
                    loss=1.0,
                    duration_us=int(self.node.clock.iteration_s * 1e6),
                    micro_batches_by_rank=shares,
                    micro_batches_repeated=0,
                )
            )

    def keep(self) -> None:
        """Its state is in the node's memory."""
        if self.membership is not None:
            self.say(
                SnapshotStored(
                    node=self.node.name,
                    task=self.spec.name,
                    origin=self.node.name,
                    shard=0,
                    iteration=self.node.clock.iteration(),
                    generation=self.membership.generation,
                    size_bytes=1 << 30,
                    shards=1,
                    duration_us=1000,
                )
            )

    @property
    def reporter(self) -> Reporter:
        return Reporter(node=self.node.name, task=self.spec.name, worker=self.name)

    def say(self, message: Any) -> None:
        self.node.feed(WorkerSaid(worker=self.name, message=message, now_us=time.monotonic_ns() // 1000))


class Acknowledged:
    """An EventLog that notes what it has acknowledged."""

    def __init__(self, log: NatsEventLog, note: Callable[[str, int, int, int], None]) -> None:
        self._log = log
        self._note = note

    async def append(self, envelopes: Sequence[Envelope], *, fence: Fence | None = None) -> list[int]:
        seqs = await self._log.append(envelopes, fence=fence)
        for envelope, seq in zip(envelopes, seqs, strict=True):
            self._note(envelope.producer, envelope.boot, envelope.number, seq)
        return seqs

    async def claim_term(self, envelope: Envelope) -> Fence:
        raise AssertionError("agents claim no terms")

    def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        raise AssertionError("agents do not read the log")

    async def skips(self) -> dict[int, str]:
        raise AssertionError("agents do not read the log")

    async def last_seq(self) -> int:
        raise AssertionError("agents do not read the log")

    async def close(self) -> None:
        """The connection is the node's."""


class Still:
    """Workers' marks are not watched: they have none."""

    def follow(self, worker: str, pid: int) -> None: ...

    def drop(self, worker: str) -> Mark | None:
        return None

    def close(self) -> None: ...

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def mark(self, worker: str) -> Mark | None:
        return None

    def take_away(self, worker: str) -> Mark | None:
        return None

    def is_stopped(self, pid: int) -> bool:
        return False

    def waited_us(self, pid: int) -> int:
        return 0


class Node(Shell):
    """One life of a node. `on_told`: told of each membership that a worker here gets, and when; `on_regrouped`: of each
    worker that follows one; `note`: see Acknowledged."""

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        login: Login,
        slots: int,
        heartbeat_s: float,
        clock: Clock,
        *,
        on_told: Callable[[Node, GroupMembership, str], None],
        on_regrouped: Callable[[Worker, GroupMembership], None],
        note: Callable[[str, int, int, int], None],
    ) -> None:
        self.name = name
        self.clock = clock
        self.workers: dict[str, Worker] = {}
        self.on_told = on_told
        self.on_regrouped = on_regrouped
        self.joined_s = 0.0
        self._urls = urls
        self._login = login
        self._heartbeat_s = heartbeat_s
        self._note = note
        self._tasks: set[asyncio.Task[None]] = set()
        boot = self.now_us()
        config = AgentConfig(
            node=name,
            address="127.0.0.1",
            slots=slots,
            version=told_version("soak", SCHEMA),
            agent_boot=boot,
            agent_socket="/run/agent.sock",
            logs="/run/logs",
            memory=MemoryService(node=name, host="127.0.0.1", port=9, token="soak"),
        )
        super().__init__(config, Remembered(), Outbox(name, boot, self.now_us), Still())
        self.watch = Still()  # type: ignore[assignment]

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """The node is switched on."""
        self._spawn(self._serve())

    async def die(self) -> None:
        """The node is switched off: nobody says a word."""
        self.closed = True
        self.workers.clear()
        self.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill_worker(self) -> str:
        """A member of the node dies by SIGKILL; its name, "" where there is none."""
        for worker in self.workers.values():
            if worker.membership is not None and not worker.leads:
                self.ended(worker, signal.SIGKILL)
                return worker.name
        return ""

    def ended(self, worker: Worker, status: int) -> None:
        """A worker's process has ended."""
        if self.workers.pop(worker.name, None) is not None:
            said = ProcessExited(worker=worker.name, pid=worker.pid, status=status)
            asyncio.get_running_loop().call_soon(self._say, said)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.closed:
            raise error

    async def _serve(self) -> None:
        """As agents/shell/daemon.py, without files and sockets."""
        connection = await connect(self._urls, name=f"agent {self.name}", login=self._login)
        try:
            terms = Terms(connection, self._coordinator_started)
            await terms.ask()
            self.fork_server_said(Inventory(store_port=9, workers=()))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_beats(connection))
                feed = NatsCommandFeed(connection, self.name)
                await feed.follow(self.tasks_here())
                self.feed(LogSeen(created="soak"))
                group.create_task(terms.follow())
                group.create_task(self.outbox.run(Acknowledged(NatsEventLog(connection), self._acknowledged)))
                group.create_task(self._take_commands(feed))
                group.create_task(self._train())
        finally:
            await connection.close()

    def _acknowledged(self, producer: str, boot: int, number: int, seq: int) -> None:
        self.joined_s = self.joined_s or time.monotonic()
        self._note(producer, boot, number, seq)

    def _coordinator_started(self, event: CoordinatorStarted) -> None:
        self.outbox.schema = min(SCHEMA, spoken_schema(event.version))

    async def _send_beats(self, connection: Connection) -> None:
        beats = NatsBeatLog(connection)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._heartbeat_s * (hash(self.name) % 1000) / 1000
        while True:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            outbox_backlog, outbox_backlog_us = self.outbox.backlog(time.monotonic())
            await beats.publish(
                self.beat(
                    load_milli=100,
                    memory_free_bytes=1 << 40,
                    outbox_backlog=outbox_backlog,
                    outbox_backlog_us=outbox_backlog_us,
                )
            )
            due_s = max(due_s + self._heartbeat_s, loop.time())

    async def _take_commands(self, feed: NatsCommandFeed) -> None:
        await self.has_joined.wait()
        await self.take_entries(feed)

    async def _train(self) -> None:
        """Iterations are committed, and states kept."""
        kept_s = time.monotonic()
        while True:
            await asyncio.sleep(self.clock.iteration_s)
            for worker in list(self.workers.values()):
                if worker.leads:
                    worker.commit()
            if self.clock.kept_every_s and time.monotonic() - kept_s >= self.clock.kept_every_s:
                kept_s = time.monotonic()
                for worker in {worker.task: worker for worker in self.workers.values()}.values():
                    worker.keep()

    # --- the ports of the shell ------------------------------------------------------------------

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def remember(self, memory: Remembered) -> None: ...

    def core_failed(self, given: Input) -> None:
        raise  # anew: called while it is handled

    def tell_worker(self, worker: str, message: ToWorker) -> None:
        light = self.workers.get(worker)
        if light is None:
            return
        if isinstance(message, GroupMembership):
            self.on_told(self, message, light.task)
        asyncio.get_running_loop().call_soon(light.hear, message)

    def tell_fork_server(self, message: ToForkServer) -> None:
        if isinstance(message, Spawn):
            worker = Worker(self, message)
            self.workers[worker.name] = worker
            asyncio.get_running_loop().call_soon(self._born, worker)
        elif isinstance(message, Kill) and message.worker in self.workers:
            self.ended(self.workers[message.worker], message.signal)

    def _born(self, worker: Worker) -> None:
        self._say(ProcessForked(worker=worker.name, pid=worker.pid))
        if worker.name in self.workers:
            hello = Hello(worker=worker.name, task=worker.task, pid=worker.pid, generation=0, ready=False)
            self.worker_connected(hello)
            worker.say(WorkerReady(**worker.reporter))

    def _say(self, message: Any) -> None:
        self.fork_server_said(message)

    def copy(self, order: CopyState) -> None: ...

    def inject_into_node(self, order: InjectIntoNode) -> None:
        self.feed(NodeFaultInjected(command_id=order.command_id, reason="not here"))

    def check(self, order: RunCheck) -> None:
        self.feed(Checked(command_id=order.command_id, has_passed=True, duration_us=1000, detail="light"))

    def probe(self, order: ProbeLinks) -> None: ...

    def take_stacks(self, order: TakeStacks) -> None: ...

    def disconnect(self, worker: str, why: str) -> None: ...

    def finish(self) -> None: ...

    def superseded(self, boot: int) -> None:
        """The node was switched on again while this life of it still reads."""

    def snapshots(self) -> Iterable[SnapshotStored]:
        return ()
