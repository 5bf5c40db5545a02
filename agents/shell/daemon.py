"""The agent of one node: its keepers, composed behind the ports of shell.py, and the order of their start and end.

Rules
-----
* What the core asks for is handed to the keeper that does it; what a keeper sees is fed to the core. Where two keepers
  are concerned, here is their order, and nothing else.
* Keepers do not know each other, but for the processes and the departure, which are handed to those that need them.
* At the end the duties stop first, NATS among them; then what they used, the workers' connections before the rest.
* The workers outlive any failure of the agent.

The keepers: process_keeper.py, memory_keeper.py, memberships.py, health_keeper.py, worker_output.py, node_queries.py,
event_log_keeper.py, departure.py (signals and exit codes). What is decided: core/.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from importlib import metadata

import msgspec

from unicrond.agents.accelerators.driver import GpuDriver
from unicrond.agents.accelerators.gpu_type import gpu_type
from unicrond.agents.accelerators.watch import open_driver
from unicrond.agents.core.agent_config import AgentConfig
from unicrond.agents.core.known_event_log import difference
from unicrond.agents.core.state import (
    Action,
    Append,
    CopyState,
    ForkServerDied,
    HeldState,
    InjectIntoNode,
    Input,
    LogSeen,
    MachineSaw,
    NodeFaultInjected,
    Remembered,
    RunCheck,
    StateHeld,
    Unreadable,
)
from unicrond.agents.host import host_resources as host
from unicrond.agents.kubernetes.place import NodeObject
from unicrond.agents.output.query_service import answer
from unicrond.agents.protocol.gpus import visible_gpus
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import (
    Exited,
    FromForkServer,
    GroupMembership,
    ReleaseMemory,
    ToForkServer,
    ToWorker,
)
from unicrond.agents.protocol.peers import plain, write_schema
from unicrond.agents.shell import probe
from unicrond.agents.shell.departure import Departure
from unicrond.agents.shell.duplicate_agent import DuplicateAgents, DuplicateWatch
from unicrond.agents.shell.event_log_guard import LogGuard
from unicrond.agents.shell.health_keeper import HealthKeeper, findings_here
from unicrond.agents.shell.memberships import Memberships, credentials_of
from unicrond.agents.shell.memory_keeper import MemoryKeeper, memory_bytes, regions_most
from unicrond.agents.shell.options import Options
from unicrond.agents.shell.outbox import Outbox
from unicrond.agents.shell.process_keeper import KillWatch, ProcessKeeper
from unicrond.agents.shell.progress_watch import MarkFiles
from unicrond.agents.shell.run_dir import BadRunDir, RunDir
from unicrond.agents.shell.shell import Shell
from unicrond.agents.shell.worker_output import WorkerOutput, make_room
from unicrond.events.host.systemd import Systemd
from unicrond.events.nats.commands import NatsCommandFeed, UnreadCommand
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.terms import Terms
from unicrond.events.queries.worker_queries import logs_subject
from unicrond.events.vocabulary import CoordinatorStarted, ExitCause, Name, NodeJoined, WorkerId
from unicrond.events.wire.envelope import Recorded
from unicrond.events.wire.schemas import SCHEMA, spoken_schema, told_version

logger = logging.getLogger("unicrond.agents")


class Agent(Shell):
    """One node's agent. `run` it once."""

    def __init__(self, options: Options, run_dir: RunDir) -> None:
        """`run_dir` is claimed already. Raises NoDriver, BadCertificate, NoCgroup."""
        self._options = options
        self._run_dir = run_dir
        self._boot = run_dir.next_boot(_wall_clock_us())
        with contextlib.suppress(OSError):  # then workers take it for an agent of the first schema
            write_schema(run_dir.path, self._boot)
        self._namesakes = DuplicateAgents(self._boot, run_dir.previous_boot, options.heartbeat_s)
        self._look_for_namesakes = asyncio.Event()
        self._kills = KillWatch(run_dir)
        outbox = Outbox(options.node, self._boot, _wall_clock_us)
        driver = open_driver(options.accelerators, visible_gpus(), options.slots)
        super().__init__(self._config(driver), self._recall(), outbox, MarkFiles(run_dir.marks))
        state_max_bytes = memory_bytes(options) // regions_most(options)
        self._processes = ProcessKeeper(self, options, run_dir, self._kills, state_max_bytes, self._fork_server_died)
        self._departure = Departure(self, options, run_dir, self._processes)
        credentials = credentials_of(options)
        self._memberships = Memberships(lambda: self.state.memory.memberships, credentials)
        self._memory = MemoryKeeper(
            options, run_dir, credentials, ask=self._processes.tell_fork_server, on_copy=self._copy_stored
        )
        self._health = HealthKeeper(self, options, run_dir, driver, self._processes)
        self._connection: Connection | None = None
        self._guard: LogGuard | None = None
        self._output = WorkerOutput(options, run_dir, lambda: self.state.memory.workers)

    def _config(self, driver: GpuDriver | None) -> AgentConfig:
        options, run_dir = self._options, self._run_dir
        return AgentConfig(
            node=options.node,
            address=options.address,
            slots=options.slots,
            version=told_version(installed_version(), SCHEMA),
            agent_boot=self._boot,
            agent_socket=str(run_dir.agent_socket),
            logs=str(run_dir.logs),
            users=options.users,
            gpu=options.gpu_type or gpu_type(driver.models if driver else ()),
            vanished=self._kills.cause_since_last_agent(),
        )

    async def run(self) -> int:
        """Work until a signal or until the node has left; the exit code."""
        self._departure.heed_signals()
        await self._processes.start()
        probes = await probe.serve(self._run_dir.probe_socket, self.condition)
        if service := self._memory.serve():
            self.state = msgspec.structs.replace(
                self.state, config=msgspec.structs.replace(self.state.config, memory=service)
            )
        logger.info("agent of %s: boot %d, run directory %s", self._options.node, self._boot, self._run_dir.path)
        linking = asyncio.create_task(self._processes.keep_fork_server(), name="fork-link")
        serving = asyncio.create_task(self._serve_nats(), name="nats")
        duties = [
            linking,
            serving,
            asyncio.create_task(self._output.prune(self.has_inventory), name="logs"),
            asyncio.create_task(self._kills.run(), name="kills"),
            asyncio.create_task(Systemd().accompany(self.has_inventory.wait(), self._status), name="systemd"),
        ]
        if self._options.shows_output:
            self._output.show()
        end = asyncio.create_task(self._departure.over.wait(), name="end")
        try:
            await asyncio.wait([end, *duties], return_when=asyncio.FIRST_COMPLETED)
            for duty in duties:
                if duty.done() and not duty.cancelled() and (error := duty.exception()):
                    logger.critical("%s failed: the agent ends, its workers stay", duty.get_name(), exc_info=error)
                    self._departure.fail()
            if self._departure.is_superseded:
                serving.cancel()  # no command that is the newer one's
                await asyncio.gather(serving, return_exceptions=True)
            await self._departure.finish(linking)
        finally:
            for task in (end, *duties):
                task.cancel()
            await asyncio.gather(end, *duties, return_exceptions=True)
            await self._health.stop_watching()
            await self._processes.close()
            await self._output.close()
            probes.close()
            await self._memory.close()
            self.close()
            await self._health.close()
            self._departure.ignore_signals()
        return self._departure.exit_code()

    def condition(self) -> probe.Condition:
        """What this agent does or waits for, for probes and systemd."""
        if self.state.phase in ("draining", "leaving", "left"):
            return probe.Condition(is_ready=False, status="leaves")
        if trouble := self._processes.trouble:
            return probe.Condition(is_ready=False, status=trouble)
        if self._connection is None or self._connection.trouble:
            why = "waits for NATS" if self._connection is None else self._connection.trouble
            return probe.Condition(is_ready=False, status=why)
        if self._guard is not None and self._guard.trouble:
            return probe.Condition(is_ready=False, status=f"waits for a person: {self._guard.trouble}")
        has_joined = self.has_joined.is_set() and self._guard is not None and self._guard.is_sure
        return probe.Condition(is_ready=has_joined, status="joined" if has_joined else "waits for the log")

    def _status(self) -> str:
        return self.condition().status

    # --- the ports of the shell ------------------------------------------------------------------

    def now_us(self) -> int:
        """See Shell: microseconds since the epoch."""
        return _wall_clock_us()

    def remember(self, memory: Remembered) -> None:
        """See Shell. A disk that refuses is logged, and the agent goes on."""
        try:
            self._run_dir.remember(memory)
        except OSError as error:
            logger.error("cannot write the agent's memory (%s): if this agent dies now, the next knows less", error)

    def core_failed(self, given: Input) -> None:
        """See Shell. Logs the exception and ends `run`; the workers stay."""
        logger.critical("the core failed on %r: the agent ends, its workers stay", given, exc_info=True)
        self._departure.fail()

    def do(self, action: Action) -> None:
        """See Shell. Logs what is appended; the accelerators are watched once the node has joined."""
        if isinstance(action, Append):
            logger.info("%s", action.event.sentence())
        super().do(action)
        if isinstance(action, Append) and isinstance(action.event, NodeJoined):
            self._health.watch_accelerators()

    def tell_worker(self, worker: WorkerId, message: ToWorker) -> None:
        """See Shell. A membership goes with this node's passes to its peers."""
        message = plain(message)
        if isinstance(message, GroupMembership):
            message = self._memberships.for_worker(worker, message)
        self._processes.tell_worker(worker, message)

    def tell_fork_server(self, message: ToForkServer) -> None:
        """See Shell."""
        self._processes.tell_fork_server(message)
        if isinstance(message, ReleaseMemory):
            self._memory.drop(message.task)

    def copy(self, order: CopyState) -> None:
        """See Shell."""
        self._memory.copy(order, self._memberships.warrant(order.task))

    def inject_into_node(self, order: InjectIntoNode) -> None:
        """See Shell."""
        self.feed(NodeFaultInjected(command_id=order.command_id, reason=self._health.inject(order.fault)))

    def check(self, order: RunCheck) -> None:
        """See Shell."""
        self._health.check(order)

    def disconnect(self, worker: WorkerId, why: str) -> None:
        """See Shell."""
        self._processes.disconnect(worker, why)

    def finish(self) -> None:
        """See Shell."""
        self._departure.leave()

    def log_tail(self, worker: WorkerId) -> str:
        """See Shell."""
        return self._output.log_tail(worker)

    def held_states(self) -> list[HeldState]:
        """See Shell."""
        return self._memory.states()

    def fork_server_said(self, message: FromForkServer) -> None:
        """See Shell. The memory regions follow what the fork server holds."""
        self._memory.fork_server_said(message, self._processes.fork_server_pid)
        if isinstance(message, Exited):
            self._output.ended(message.worker)
        super().fork_server_said(message)

    def _copy_stored(self, state: HeldState) -> None:
        self.feed(StateHeld(held_state=state))

    def _fork_server_died(self, cause: ExitCause) -> None:
        self._memory.fork_server_died()
        self.feed(ForkServerDied(cause=cause))

    # --- memory ----------------------------------------------------------------------------------

    def _recall(self) -> Remembered:
        try:
            return self._run_dir.recall()
        except BadRunDir as error:
            logger.error("%s; the fork server's inventory says which workers live", error)
            return Remembered()

    # --- NATS ------------------------------------------------------------------------------------

    async def _serve_nats(self) -> None:
        """Everything that needs NATS. Workers do not: they start, train and are adopted without it."""
        node = self._options.node
        connection = self._connection = Connection(self._options.nats, name=f"agent {node}", login=self._options.login)
        await connection.start(None)
        try:
            terms = Terms(connection, self._coordinator_started, lambda: guard.look())
            guard = self._guard = LogGuard(
                connection, terms, lambda: self.state.memory, lambda: self.read_seq, self._may_take_any_log
            )
            self.outbox.on_backward = guard.look
            await terms.ask()  # before the first word: the coordinator must be able to read it
            watch = DuplicateWatch(
                connection,
                node,
                self._namesakes,
                self._look_for_namesakes,
                self._departure.supersede,
                self._departure.outrun,
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(watch.run())
                group.create_task(self._send_beats(connection))
                group.create_task(terms.follow())
                group.create_task(self._serve_logs(connection))
                if self._options.kubernetes is not None:
                    group.create_task(self._keep_node_object(connection, self._options.kubernetes))
                await watch.alone(self.has_inventory)
                while True:
                    seen = await guard.wait_for_log()
                    if difference(self.state.memory, seen, self.read_seq):
                        terms.forget()
                        await terms.ask()
                    await self._use_log(connection, guard, seen)
        finally:
            await connection.close()

    async def _use_log(self, connection: Connection, guard: LogGuard, seen: LogSeen) -> None:
        """Obey this log and append to it, until another stands in its place. `seen`: by the last answer."""
        joins = asyncio.Event()

        async def work() -> None:
            # With a key it has no right to make the consumer: the coordinator makes and fits it.
            feed = NatsCommandFeed(
                connection,
                self._options.node,
                on_unread=self._cannot_read,
                makes_consumer=self._options.login.key is None,
                on_interrupted=guard.look,
            )
            # Before the node joins: one that cannot be commanded must not be planned for.
            await feed.follow(self.tasks_here(seen))
            joins.set()
            self.feed(seen)
            async with asyncio.TaskGroup() as group:
                group.create_task(self.outbox.run(NatsEventLog(connection, session_gate=guard.trusts)))
                group.create_task(self._take_commands(feed))

        async with asyncio.TaskGroup() as group:
            working = group.create_task(work())
            await guard.wait_until_replaced(lambda now: self.feed(now) if joins.is_set() else None)
            working.cancel()

    async def _keep_node_object(self, connection: Connection, named: NodeObject) -> None:
        from unicrond.agents.kubernetes.api import NodeApi
        from unicrond.agents.kubernetes.keeper import KubernetesNode

        api = NodeApi(named.url, named.name, named.account)
        keeper = KubernetesNode(
            api,
            self._options.node,
            named.cordon_means,
            lambda held: self.feed(MachineSaw(hold=held.hold, reason=held.reason)),
        )
        await keeper.run(connection)

    def _may_take_any_log(self) -> bool:
        """This agent has just begun, and nothing of another log is left here; or a person has told it to."""
        if self.has_joined.is_set() or not self.has_inventory.is_set():
            return False
        memory = self.state.memory
        return self._options.new_log or not (memory.workers or memory.waiting or self.state.holds)

    def _coordinator_started(self, event: CoordinatorStarted) -> None:
        schema = min(SCHEMA, spoken_schema(event.version))
        if schema != self.outbox.schema:
            logger.info("the coordinator of term %d reads schema %d", event.term, schema)
            self.outbox.schema = schema

    async def _send_beats(self, connection: Connection) -> None:
        beats = NatsBeatLog(connection)
        await self.has_inventory.wait()  # before that the node can do nothing
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            kept_back, kept_back_us = self.outbox.backlog(time.monotonic())
            envelope = self.beat(
                load_milli=host.load_milli(),
                memory_free_bytes=host.memory_free_bytes(),
                kept_back=kept_back,
                kept_back_us=kept_back_us,
            )
            await beats.publish(envelope)
            due_s = max(due_s + self._options.heartbeat_s, loop.time())
            await asyncio.sleep(due_s - loop.time())

    async def _take_commands(self, feed: NatsCommandFeed) -> None:
        await self.has_joined.wait()
        await self.take_entries(feed)

    def take(self, recorded: Recorded) -> None:
        """See Shell. Logs the entry."""
        logger.info("%s: %s", recorded.envelope.event_id, recorded.envelope.event.sentence())
        super().take(recorded)

    def _cannot_read(self, order: UnreadCommand) -> None:
        self.feed(Unreadable(command_id=order.command_id, cause=order.event_id, reason=order.reason))

    async def _serve_logs(self, connection: Connection) -> None:
        node = self._options.node

        async def on_request(message: object) -> None:
            data, respond = message.data, message.respond  # type: ignore[attr-defined]  # a nats Msg
            if self._health.begin_check(data, respond):
                return
            with contextlib.suppress(Exception):  # a requester that has gone does not concern this agent
                logs, flight = self._run_dir.logs, self._processes.ask_flight
                await respond(await answer(node, logs, self._pid_of, data, self._marks_of, flight))

        await connection.subscribe(logs_subject(node), on_request)

    def _marks_of(self, task: Name) -> dict[WorkerId, Mark]:
        files = MarkFiles(self._run_dir.marks)
        running = (name for name in self.state.memory.workers if name.rpartition(".")[0] == task)
        return {name: mark for name in running if (mark := files.mark(name)) is not None}

    def _pid_of(self, worker: WorkerId) -> int:
        known = self.state.memory.workers.get(worker)
        return known.pid if known else 0

    # --- others of our name ----------------------------------------------------------------------

    def superseded(self, boot: int) -> None:
        """See Shell. That agent is heard soon; one that is not belongs to no agent."""
        logger.warning("a command is for a later agent of this name (boot %d): it is left to that one", boot)
        self._namesakes.note_logged(boot, time.monotonic())
        self._look_for_namesakes.set()


async def run_agent(options: Options) -> int:
    """Claim the run directory and work in it until told to end; the exit code. Raises BadRunDir, NoDriver,
    BadCertificate, NoCgroup."""
    run_dir = RunDir(options.run_dir, options.logs_dir)
    run_dir.claim()
    try:
        make_room(options, run_dir)
        for finding in findings_here(options):
            logger.warning("%s", finding)
        return await Agent(options, run_dir).run()
    finally:
        run_dir.release()


def _wall_clock_us() -> int:
    return time.time_ns() // 1000


def installed_version() -> str:
    """The version of the installed package, "unknown" where it is not installed."""
    try:
        return metadata.version("unicrond")
    except metadata.PackageNotFoundError:
        return "unknown"
