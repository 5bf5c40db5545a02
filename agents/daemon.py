"""The node agent's shell: clocks, sockets, signals and NATS behind the ports of shell.py.

Ends
----
* SIGTERM (a restart): the agent goes, fork server and workers stay for the next one.
* SIGINT, or the core's Finish (the node leaves): workers, store and fork server are ended first.
* A newer agent of the same name (namesakes.py): exit code EXIT_SUPERSEDED, the workers end; a later boot in the log
  that no agent has: exit code 1, and the next boot is above it.
* Anything unexpected: exit code 1 with a traceback; the agent's supervisor starts the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec

from agents import host
from agents.accelerators.diagnosis import Finding
from agents.accelerators.driver import Choice
from agents.accelerators.watch import AcceleratorWatch, open_driver
from agents.copies import Copies
from agents.fork_link import ForkLink
from agents.health import Health
from agents.log_identity import log_identity
from agents.log_layout import worker_log
from agents.log_pruning import Limits, prune
from agents.log_service import answer
from agents.memory_regions import MemoryRegions
from agents.memory_server import MemoryServer
from agents.namesakes import EXIT_SUPERSEDED, Namesakes, NamesakeWatch
from agents.node_faults import NodeFaults
from agents.outbox import Outbox
from agents.protocol.gpus import visible_gpus
from agents.protocol.messages import Forget, FromForkServer, Inventory, KeepFailed, Kept, ToForkServer, ToWorker
from agents.protocol.peers import plain, write_schema
from agents.rotated_log import tail
from agents.run_dir import BadRunDir, RunDir
from agents.shell import Shell
from agents.state import (
    AcceleratorSaw,
    Action,
    Append,
    Config,
    CopyState,
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
    StateHeld,
    Unreadable,
    WorkerDisconnected,
    WorkerSaid,
)
from agents.watch import MarkFiles
from agents.worker_sockets import WorkerSockets
from events.envelope import Recorded
from events.logs_request import logs_subject
from events.nats_commands import NatsCommandFeed, UnreadOrder
from events.nats_connection import Connection, Login, connect
from events.nats_log import NatsBeatLog, NatsEventLog
from events.nats_terms import Terms
from events.prose import summary
from events.schemas import SCHEMA, spoken_schema, told_version
from events.vocabulary import CoordinatorStarted, MemoryService, Name, NodeJoined, WorkerId

logger = logging.getLogger("agents")

#: How much of a log goes with an unexpected exit.
LOG_TAIL_BYTES = 4096
_DRAIN_TIMEOUT_S = 5.0
_RETIRE_TIMEOUT_S = 10.0
_PRUNE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a person chooses (cli.py). `fork_server_arguments`: further flags of agents.fork_server.server.

    `memory_bytes`: for states of training; None: a quarter of the host's, 0: none. `accelerators`: the source of their
    health. `logs_dir`: of workers; None: in the run directory. `logs_max_age_s`, `logs_max_bytes`: None: see
    log_pruning.py.
    """

    nats: tuple[str, ...]
    node: Name
    slots: int
    address: str = "127.0.0.1"
    run_dir: Path
    heartbeat_s: float = 1.0
    lease_s: float = 60.0
    login: Login = field(default_factory=Login)
    memory_bytes: int | None = None
    logs_dir: Path | None = None
    logs_max_age_s: float | None = None
    logs_max_bytes: int | None = None
    accelerators: Choice = "auto"
    fork_server_arguments: tuple[str, ...] = ()


class Agent(Shell):
    """One node's agent. `run` it once."""

    def __init__(self, options: Options, run_dir: RunDir) -> None:
        """`run_dir` is claimed already. Raises NoDriver."""
        self._options = options
        self._run_dir = run_dir
        self._boot = run_dir.next_boot(_wall_clock_us())
        with contextlib.suppress(OSError):  # then workers take it for an agent of schema 1, and say less
            write_schema(run_dir.path, self._boot)
        self._namesakes = Namesakes(self._boot, run_dir.previous_boot, options.heartbeat_s)
        self._superseded_by = 0
        config = Config(
            node=options.node,
            address=options.address,
            slots=options.slots,
            version=told_version(installed_version(), SCHEMA),
            agent_boot=self._boot,
            agent_socket=str(run_dir.agent_socket),
            logs=str(run_dir.logs),
        )
        outbox = Outbox(options.node, self._boot, _wall_clock_us)
        super().__init__(config, self._recall(), outbox, MarkFiles(run_dir.marks))
        self._sockets = WorkerSockets(
            run_dir.agent_socket,
            on_connected=self.worker_connected,
            on_message=lambda worker, message: self.feed(WorkerSaid(worker=worker, message=message)),
            on_disconnected=lambda worker: self.feed(WorkerDisconnected(worker=worker)),
        )
        self._link = ForkLink(
            run_dir,
            arguments=[
                *("--address", options.address),
                *("--lease-s", str(options.lease_s)),
                *("--memory-max-bytes", str(self._memory_bytes() // (2 * options.slots))),
                *options.fork_server_arguments,
            ],
            on_message=self.fork_server_said,
            on_death=self._fork_server_died,
        )
        # Each slot's own state, and as many copies of others'.
        self._regions = MemoryRegions(self._link.send, most=2 * options.slots)
        self._copies = Copies(options.node, self._regions)
        port, token = run_dir.exchange()
        self._exchange_port, self._token = port, token
        self._memory_server = MemoryServer(self._regions, token, lambda held: self.feed(StateHeld(held=held)))
        self._accelerator_driver = open_driver(options.accelerators, visible_gpus(), options.slots)
        self._accelerators: AcceleratorWatch | None = None
        self._node_faults = NodeFaults(self._link.kill, self._report_xid)
        self._health = Health(options.node, options.slots, options.accelerators, self.feed)
        self._over = asyncio.Event()
        self._is_left = False
        self._failed = False

    async def run(self) -> int:
        """Work until a signal or until the node has left; the exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._hand_over)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        await self._sockets.start()
        self._serve_memory()
        logger.info("agent of %s: boot %d, run directory %s", self._options.node, self._boot, self._run_dir.path)
        linking = asyncio.create_task(self._link.run(), name="fork-link")
        serving = asyncio.create_task(self._serve_nats(), name="nats")
        duties = [
            linking,
            serving,
            asyncio.create_task(self._prune_logs(), name="logs"),
        ]
        end = asyncio.create_task(self._over.wait(), name="end")
        try:
            await asyncio.wait([end, *duties], return_when=asyncio.FIRST_COMPLETED)
            for duty in duties:
                if duty.done() and not duty.cancelled() and (error := duty.exception()):
                    logger.critical("%s failed: the agent ends, its workers stay", duty.get_name(), exc_info=error)
                    self._failed = True
            if self._superseded_by:
                serving.cancel()  # no command that is the newer one's
                await asyncio.gather(serving, return_exceptions=True)
            await self._finish(linking)
        finally:
            for task in (end, *duties):
                task.cancel()
            await asyncio.gather(end, *duties, return_exceptions=True)
            if self._accelerators:
                await self._accelerators.close()
            await self._sockets.close()
            self._memory_server.close()
            await self._copies.close()
            self.close()
            await self._health.close()
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)
        return EXIT_SUPERSEDED if self._superseded_by else 1 if self._failed else 0

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
        self._failed = True
        self._over.set()

    def do(self, action: Action) -> None:
        """See Shell. Logs what is appended; the accelerators are watched once the node has joined."""
        if isinstance(action, Append):
            logger.info("%s", summary(action.event))  # type: ignore[arg-type]  # every Observation is one of AnyEvent
        super().do(action)
        if isinstance(action, Append) and isinstance(action.event, NodeJoined):
            self._watch_accelerators()

    def tell_worker(self, worker: WorkerId, message: ToWorker) -> None:
        """See Shell."""
        self._sockets.send(worker, plain(message))

    def tell_fork_server(self, message: ToForkServer) -> None:
        """See Shell."""
        self._link.send(plain(message))
        if isinstance(message, Forget):
            self._regions.forgotten(message.task)

    def copy(self, order: CopyState) -> None:
        """See Shell."""
        self._copies.copy(order.task, order.shard, order.peers)

    def inject_into_node(self, order: InjectIntoNode) -> None:
        """See Shell."""
        self.feed(NodeFaultInjected(command_id=order.command_id, reason=self._node_faults.inject(order.fault)))

    def check(self, order: RunCheck) -> None:
        """See Shell."""
        self._health.check(order)

    def disconnect(self, worker: WorkerId, why: str) -> None:
        """See Shell."""
        logger.error("%s: connection refused, %s", worker, why)
        self._sockets.disconnect(worker)

    def finish(self) -> None:
        """See Shell."""
        self._is_left = True
        self._over.set()

    def log_tail(self, worker: WorkerId) -> str:
        """See Shell. At most LOG_TAIL_BYTES bytes; bytes that are not UTF-8 are replaced."""
        path = worker_log(self._run_dir.logs, worker.rpartition(".")[0], worker)
        return tail(path, LOG_TAIL_BYTES).decode(errors="replace")

    def held_states(self) -> list[Held]:
        """See Shell."""
        return self._regions.found(self._options.node)

    def fork_server_said(self, message: FromForkServer) -> None:
        """See Shell. The memory regions follow what the fork server holds."""
        if isinstance(message, Inventory):
            self._regions.held_by(self._link.pid, message.kept)
        elif isinstance(message, Kept | KeepFailed):
            self._regions.said(message)
        super().fork_server_said(message)

    def _fork_server_died(self) -> None:
        self._regions.held_by(0, ())
        self.feed(ForkServerDied())

    # --- states in memory ------------------------------------------------------------------------

    def _memory_bytes(self) -> int:
        chosen = self._options.memory_bytes
        return host.memory_total_bytes() // 4 if chosen is None else chosen

    def _serve_memory(self) -> None:
        """Take and give states, where the agent before did if that can be."""
        if not self._memory_bytes():
            return
        options = self._options
        self._memory_server.start(options.address, self._exchange_port)
        try:
            self._run_dir.remember_exchange(self._memory_server.port, self._token)
        except OSError as error:
            logger.error("cannot record the port for states (%s): the next agent takes another one", error)
        service = MemoryService(
            node=options.node, host=options.address, port=self._memory_server.port, token=self._token
        )
        config = msgspec.structs.replace(self.state.config, memory=service)
        self.state = msgspec.structs.replace(self.state, config=config)

    # --- accelerators ----------------------------------------------------------------------------

    def _watch_accelerators(self) -> None:
        """From when the log knows the node and its workers: an earlier report would mean nothing to readers."""
        if self._accelerator_driver and not self._accelerators:
            self._accelerators = AcceleratorWatch(self._accelerator_driver, self._workers_by_slot, self._found)

    def _workers_by_slot(self) -> dict[int, WorkerId]:
        return {record.slot: worker for worker, record in self.state.memory.workers.items() if not record.foreign}

    def _found(self, accelerator: str, worker: str, finding: Finding) -> None:
        self.feed(
            AcceleratorSaw(
                accelerator=accelerator,
                worker=worker,
                kind=finding.kind,
                xid=finding.xid,
                message=finding.message,
                needs=finding.needs,
            )
        )

    def _report_xid(self, code: int, worker: str) -> str:
        if self._accelerators is None:
            return (
                "xid: no accelerator is watched here; start the agent with --accelerators fake to drill on a CPU node"
            )
        return self._accelerators.report_xid(code, worker)

    # --- memory ----------------------------------------------------------------------------------

    def _recall(self) -> Remembered:
        try:
            return self._run_dir.recall()
        except BadRunDir as error:
            logger.error("%s; the fork server's inventory says which workers live", error)
            return Remembered()

    async def _prune_logs(self) -> None:
        """Once the living workers are known, and now and then."""
        await self.has_inventory.wait()
        while True:
            living = frozenset(self.state.memory.workers)
            await asyncio.to_thread(prune_logs, self._options, self._run_dir, living)
            await asyncio.sleep(_PRUNE_EVERY_S)

    # --- NATS ------------------------------------------------------------------------------------

    async def _serve_nats(self) -> None:
        """Everything that needs NATS. Workers do not: they start, train and are adopted without it."""
        node = self._options.node
        connection = await connect(self._options.nats, name=f"agent {node}", login=self._options.login)
        try:
            terms = Terms(connection, self._coordinator_started)
            await terms.ask()  # before the first word: the coordinator must be able to read it
            identity = await log_identity(connection)
            watch = NamesakeWatch(connection, node, self._namesakes, self._superseded, self._outrun)
            async with asyncio.TaskGroup() as group:
                group.create_task(watch.run())
                group.create_task(self._send_beats(connection))
                await watch.alone(self.has_inventory)
                # With a key it has no right to: the coordinator makes and fits the consumer.
                makes = self._options.login.key is None
                feed = NatsCommandFeed(connection, node, on_unread=self._cannot_read, makes_consumer=makes)
                # Before the node joins: one that cannot be commanded must not be planned for.
                await feed.follow(self.tasks_here())
                self.feed(LogSeen(identity=identity))
                group.create_task(terms.follow())
                group.create_task(self.outbox.run(NatsEventLog(connection)))
                group.create_task(self._take_commands(feed))
                group.create_task(self._serve_logs(connection))
        finally:
            await connection.close()

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
            kept_back, kept_back_us = self.outbox.kept_back(time.monotonic())
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
        logger.info("%s: %s", recorded.envelope.event_id, summary(recorded.envelope.event))
        super().take(recorded)

    def _cannot_read(self, order: UnreadOrder) -> None:
        self.feed(Unreadable(command_id=order.command_id, cause=order.event_id, reason=order.reason))

    async def _serve_logs(self, connection: Connection) -> None:
        node = self._options.node

        async def on_request(message: object) -> None:
            data, respond = message.data, message.respond  # type: ignore[attr-defined]  # a nats Msg
            with contextlib.suppress(Exception):  # a requester that has gone does not concern this agent
                await respond(answer(node, self._run_dir.logs, data))

        await connection.subscribe(logs_subject(node), on_request)

    # --- others of our name ----------------------------------------------------------------------

    def _superseded(self, boot: int) -> None:
        if self._superseded_by:
            return
        self._superseded_by, self.closed = boot, True
        logger.critical(
            "a newer agent of the name %s is at work (boot %d, this one has %d): this one ends. "
            "Two nodes with one name? Give this one another (--node) before it is started again",
            self._options.node,
            boot,
            self._boot,
        )
        self._over.set()

    def _outrun(self, boot: int) -> None:
        logger.critical(
            "the log holds a later boot of %s (%d, this one has %d) and hears no agent under it: the log ignores "
            "this agent. It ends; the next one gets a later boot",
            self._options.node,
            boot,
            self._boot,
        )
        self._run_dir.write_boot(boot)
        self._failed = True
        self._over.set()

    # --- the end ---------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        logger.info("SIGTERM: this agent ends; its workers stay for the next one, at most %g s", self._options.lease_s)
        self.feed(HandOver())
        self._over.set()

    def _interrupted(self) -> None:
        if self.state.phase == "leaving":
            logger.warning("SIGINT again: not waiting for the workers")
            self._is_left = True
            self._over.set()
            return
        logger.info("SIGINT: ending the workers, then the node leaves (again: at once)")
        self.feed(Leave(reason="the agent was interrupted"))

    async def _finish(self, linking: asyncio.Task[None]) -> None:
        """What is still to be done before the connections go."""
        if self._superseded_by:  # the log takes nothing of ours
            if self._run_dir.is_newer_ones(self._superseded_by):
                logger.warning("the newer agent works in %s too and keeps the workers", self._run_dir.path)
                return
            await self._retire(linking)
            return
        if not await self.outbox.drained(_DRAIN_TIMEOUT_S):
            logger.error("%d observations did not reach the log in time and were lost", len(self.outbox))
        if self._is_left:
            await self._retire(linking)

    async def _retire(self, linking: asyncio.Task[None]) -> None:
        """End the workers, the store and the fork server."""
        self._link.retire()
        if not (await asyncio.wait([linking], timeout=_RETIRE_TIMEOUT_S))[0]:
            logger.error("the fork server does not end; see %s", self._run_dir.fork_server_log)


async def run_agent(options: Options) -> int:
    """Claim the run directory and work in it until told to end; the exit code. Raises BadRunDir, NoDriver."""
    run_dir = RunDir(options.run_dir, options.logs_dir)
    run_dir.claim()
    try:
        make_room(options, run_dir)
        return await Agent(options, run_dir).run()
    finally:
        run_dir.release()


def make_room(options: Options, run_dir: RunDir) -> None:
    """Where the volume is full, logs of ended workers go before anything is written."""
    usage = shutil.disk_usage(run_dir.path)
    if usage.free >= Limits.of(run_dir.path, None, None).reserve_bytes:
        return
    logger.error("the volume of %s is full (%d of %d bytes free)", run_dir.path, usage.free, usage.total)
    with contextlib.suppress(BadRunDir):  # without the memory this agent does not know which workers live
        prune_logs(options, run_dir, frozenset(run_dir.recall().workers))


def prune_logs(options: Options, run_dir: RunDir, living: frozenset[WorkerId]) -> None:
    """See log_pruning.py."""
    try:
        run_dir.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        limits = Limits.of(run_dir.logs, options.logs_max_age_s, options.logs_max_bytes)
        count, size_bytes = prune(run_dir.logs, living, limits, time.time())
    except OSError as error:
        logger.error("cannot prune the workers' logs: %s", error)
        return
    if count:
        logger.warning("removed the logs of %d ended workers (%d bytes)", count, size_bytes)


def _wall_clock_us() -> int:
    return time.time_ns() // 1000


def installed_version() -> str:
    """The version of the installed package, "unknown" where it is not installed."""
    try:
        return metadata.version("unicrond")
    except metadata.PackageNotFoundError:
        return "unknown"
