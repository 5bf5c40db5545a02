"""The node agent's shell: clocks, sockets, signals and NATS around the pure core (core.py).

Everything that happens becomes an input to `core.handle` in one place, `feed`; everything the core asks for is
done in one place, `_do`. Both run in the event loop and never wait, so inputs are handled one after another.

Ends
----
* SIGTERM (a restart): the agent goes, fork server and workers stay for the next one.
* SIGINT, or the core's Finish (the node leaves): workers, store and fork server are ended first.
* A newer agent of the same name (namesakes.py): exit code EXIT_SUPERSEDED, the workers end; a later boot in the log
  that is nobody's: exit code 1, and the next boot is above it.
* Anything unexpected: exit code 1 with a traceback; whoever supervises the agent starts the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import assert_never

import msgspec

from agents import core, host
from agents.accelerators.diagnosis import Finding
from agents.accelerators.driver import Choice
from agents.accelerators.watch import AcceleratorWatch, open_driver
from agents.copies import Copies
from agents.fork_link import ForkLink
from agents.gpus import visible_gpus
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
from agents.rotated_log import tail
from agents.run_dir import BadRunDir, RunDir
from agents.state import (
    AcceleratorSaw,
    Action,
    Append,
    Appended,
    ArmTimer,
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
    Memory,
    RunCheck,
    Stalled,
    StateHeld,
    StrikeNode,
    Struck,
    TellForkServer,
    TellWorker,
    TimerFired,
    Unreadable,
    WorkerConnected,
    WorkerDisconnected,
    WorkerSaid,
)
from agents.trainer.messages import Exited, Forget, FromForkServer, Hello, Inventory, KeepFailed, Kept
from agents.trainer.peers import plain, write_schema
from agents.watch import MarkFiles, Watch
from agents.worker_sockets import WorkerSockets
from events.envelope import Envelope
from events.logs_request import logs_subject
from events.nats_commands import NatsCommandFeed, UnreadOrder
from events.nats_connection import Connection, Login, connect
from events.nats_log import NatsBeatLog, NatsEventLog
from events.nats_terms import Terms
from events.prose import summary
from events.schemas import SCHEMA, lowered, spoken_schema, told_version
from events.vocabulary import Command, CoordinatorStarted, Heartbeat, MemoryService, Name, NodeJoined, WorkerId

logger = logging.getLogger("agents")

#: How much of a log goes with an unexpected exit.
LOG_TAIL_BYTES = 4096
_DRAIN_TIMEOUT_S = 5.0
_RETIRE_TIMEOUT_S = 10.0
_PRUNE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a person chooses (cli.py). `fork_server_arguments`: further flags of agents.fork_server.

    `memory_bytes`: for states of training; None: a quarter of the host's, 0: none. `accelerators`: who watches them.
    `logs_dir`: of workers; None: in the run directory. `logs_max_age_s`, `logs_max_bytes`: None: see log_pruning.py.
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


class Agent:
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
        self._state = core.resume(config, self._recall())
        self._outbox = Outbox(options.node, self._boot, _wall_clock_us)
        self._sockets = WorkerSockets(
            run_dir.agent_socket,
            on_connected=self._worker_connected,
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
            on_message=self._fork_server_said,
            on_death=self._fork_server_died,
        )
        # Each slot's own state, and as many copies of others'.
        self._regions = MemoryRegions(self._link.send, most=2 * options.slots)
        self._copies = Copies(options.node, self._regions)
        port, token = run_dir.exchange()
        self._exchange_port, self._token = port, token
        self._memory_server = MemoryServer(self._regions, token, lambda held: self.feed(StateHeld(held=held)))
        self._watch = Watch(
            MarkFiles(run_dir.marks),
            on_late=lambda worker, mark, still_us, stopped, times: self.feed(
                Stalled(worker=worker, mark=mark, still_us=still_us, stopped=stopped, times=times)
            ),
        )
        self._accelerator_driver = open_driver(options.accelerators, visible_gpus(), options.slots)
        self._accelerators: AcceleratorWatch | None = None
        self._node_faults = NodeFaults(self._link.kill, self._report_xid)
        self._health = Health(options.node, options.slots, options.accelerators, self.feed)
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._has_inventory = asyncio.Event()
        self._has_joined = asyncio.Event()
        self._over = asyncio.Event()
        self._is_left = False
        self._failed = False
        self._beat = 0

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
            self._watch.close()
            await self._health.close()
            for timer in self._timers.values():
                timer.cancel()
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)
        return EXIT_SUPERSEDED if self._superseded_by else 1 if self._failed else 0

    # --- the one way in and the one way out ------------------------------------------------------

    def feed(self, given: Input) -> None:
        """Let the core handle one input, write down what the next agent must know, do what the core asks for."""
        if self._superseded_by:
            return
        before = self._state.memory
        try:
            self._state, actions = core.handle(self._state, given)
        except Exception:
            logger.critical("the core failed on %r: the agent ends, its workers stay", given, exc_info=True)
            self._failed = True
            self._over.set()
            return
        if self._state.memory is not before:
            self._remember(self._state.memory)
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Append(event=event, caused_by=caused_by, confirm=confirm):
                logger.info("%s", summary(event))  # type: ignore[arg-type]  # every Observation is one of AnyEvent
                on_durable = (lambda: self.feed(Appended(event=event))) if confirm else None
                self._outbox.put(event, caused_by=caused_by, on_durable=on_durable)
                if isinstance(event, NodeJoined):
                    self._has_joined.set()
                    self._watch_accelerators()
            case TellWorker(worker=worker, message=to_worker):
                self._sockets.send(worker, plain(to_worker))
            case TellForkServer(message=to_fork_server):
                self._link.send(plain(to_fork_server))
                if isinstance(to_fork_server, Forget):
                    self._regions.forgotten(to_fork_server.task)
            case CopyState(task=task, shard=shard, peers=peers):
                self._copies.copy(task, shard, peers)
            case ArmTimer(name=name, key=key, after_s=after_s):
                if running := self._timers.pop((name, key), None):
                    running.cancel()
                fired = TimerFired(name=name, key=key)
                self._timers[name, key] = asyncio.get_running_loop().call_later(after_s, self._fire, fired)
            case StrikeNode(fault=fault, command_id=command_id):
                self.feed(Struck(command_id=command_id, reason=self._node_faults.strike(fault)))
            case RunCheck():
                self._health.check(action)
            case Disconnect(worker=worker, why=why):
                logger.error("%s: connection refused, %s", worker, why)
                self._sockets.disconnect(worker)
            case Finish():
                self._is_left = True
                self._over.set()
            case _ as never:
                assert_never(never)

    def _fire(self, fired: TimerFired) -> None:
        self._timers.pop((fired.name, fired.key), None)
        self.feed(fired)

    def _worker_connected(self, hello: Hello) -> None:
        self.feed(WorkerConnected(hello=hello))
        if hello.worker in self._state.memory.workers:
            self._watch.follow(hello.worker, hello.pid)

    def _fork_server_said(self, message: FromForkServer) -> None:
        log_tail, mark = "", None
        if isinstance(message, Inventory):
            self._regions.held_by(self._link.pid, message.kept)
        elif isinstance(message, Kept | KeepFailed):
            self._regions.said(message)
        elif isinstance(message, Exited):
            mark = self._watch.drop(message.worker)
            task = message.worker.rpartition(".")[0]
            path = worker_log(self._run_dir.logs, task, message.worker)
            log_tail = tail(path, LOG_TAIL_BYTES).decode(errors="replace")
        self.feed(ForkServerSaid(message=message, log_tail=log_tail, mark=mark))
        if isinstance(message, Inventory):
            for entry in message.workers:  # who stands still says no hello to a new agent
                self._watch.follow(entry.worker, entry.pid)
            for held in self._regions.found(self._options.node):
                self.feed(StateHeld(held=held))
        if self._state.store_port:
            self._has_inventory.set()

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
            logger.error("cannot write down where states are taken (%s): the next agent takes another port", error)
        service = MemoryService(
            node=options.node, host=options.address, port=self._memory_server.port, token=self._token
        )
        config = msgspec.structs.replace(self._state.config, memory=service)
        self._state = msgspec.structs.replace(self._state, config=config)

    # --- accelerators ----------------------------------------------------------------------------

    def _watch_accelerators(self) -> None:
        """From when the log knows the node and its workers: before that, nobody could make anything of it."""
        if self._accelerator_driver and not self._accelerators:
            self._accelerators = AcceleratorWatch(self._accelerator_driver, self._workers_by_slot, self._found)

    def _workers_by_slot(self) -> dict[int, WorkerId]:
        return {record.slot: worker for worker, record in self._state.memory.workers.items() if not record.foreign}

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

    def _recall(self) -> Memory:
        try:
            return self._run_dir.recall()
        except BadRunDir as error:
            logger.error("%s; the fork server's inventory says what there is", error)
            return Memory()

    def _remember(self, memory: Memory) -> None:
        try:
            self._run_dir.remember(memory)
        except OSError as error:
            logger.error("cannot write the agent's memory (%s): if this agent dies now, the next knows less", error)

    async def _prune_logs(self) -> None:
        """Once it is known who lives, and now and then."""
        await self._has_inventory.wait()
        while True:
            living = frozenset(self._state.memory.workers)
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
                await watch.alone(self._has_inventory)
                self.feed(LogSeen(identity=identity))
                group.create_task(terms.follow())
                group.create_task(self._outbox.run(NatsEventLog(connection)))
                group.create_task(self._take_commands(connection))
                group.create_task(self._serve_logs(connection))
        finally:
            await connection.close()

    def _coordinator_started(self, event: CoordinatorStarted) -> None:
        schema = min(SCHEMA, spoken_schema(event.version))
        if schema != self._outbox.schema:
            logger.info("the coordinator of term %d reads schema %d", event.term, schema)
            self._outbox.schema = schema

    async def _send_beats(self, connection: Connection) -> None:
        beats = NatsBeatLog(connection)
        await self._has_inventory.wait()  # before that the node can do nothing
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            self._beat += 1
            kept_back, kept_back_us = self._outbox.kept_back(time.monotonic())
            beat = Heartbeat(
                node=self._options.node,
                agent_boot=self._boot,
                beat=self._beat,
                workers=len(self._state.memory.workers),
                load_milli=host.load_milli(),
                memory_free_bytes=host.memory_free_bytes(),
                kept_back=kept_back,
                kept_back_us=kept_back_us,
            )
            envelope = Envelope(
                producer=self._options.node,
                boot=self._boot,
                number=self._beat,
                observed_at_us=_wall_clock_us(),
                event=lowered(beat, self._outbox.schema) or beat,
            )
            await beats.publish(envelope)
            due_s = max(due_s + self._options.heartbeat_s, loop.time())
            await asyncio.sleep(due_s - loop.time())

    async def _take_commands(self, connection: Connection) -> None:
        await self._has_joined.wait()
        feed = NatsCommandFeed(connection, self._options.node, on_unread=self._cannot_read)
        async with aclosing(feed.read()) as commands:
            async for recorded in commands:
                envelope = recorded.envelope
                if not isinstance(envelope.event, Command):
                    continue
                logger.info("%s: %s", envelope.event_id, summary(envelope.event))
                age_s = max(0.0, (_wall_clock_us() - recorded.recorded_at_us) / 1e6)
                self.feed(Commanded(command=envelope.event, term=envelope.term, cause=envelope.event_id, age_s=age_s))

    def _cannot_read(self, order: UnreadOrder) -> None:
        self.feed(Unreadable(command_id=order.command_id, cause=order.event_id, reason=order.reason))

    async def _serve_logs(self, connection: Connection) -> None:
        node = self._options.node

        async def on_request(message: object) -> None:
            data, respond = message.data, message.respond  # type: ignore[attr-defined]  # a nats Msg
            with contextlib.suppress(Exception):  # a requester that has gone is no concern of ours
                await respond(answer(node, self._run_dir.logs, data))

        await connection.subscribe(logs_subject(node), on_request)

    # --- others of our name ----------------------------------------------------------------------

    def _superseded(self, boot: int) -> None:
        if self._superseded_by:
            return
        self._superseded_by = boot
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
            "the log holds a later boot of %s (%d, this one has %d) and nobody is heard under it: this agent is not "
            "listened to. It ends; started again, it has a later one",
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
        if self._state.phase == "leaving":
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
                logger.warning("the newer agent works in %s too: the workers are left to it", self._run_dir.path)
                return
            await self._retire(linking)
            return
        if not await self._outbox.drained(_DRAIN_TIMEOUT_S):
            logger.error("%d observations did not reach the log in time and are lost", len(self._outbox))
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
    with contextlib.suppress(BadRunDir):  # without the memory nobody here knows who lives
        prune_logs(options, run_dir, frozenset(run_dir.recall().workers))


def prune_logs(options: Options, run_dir: RunDir, living: frozenset[WorkerId]) -> None:
    """See log_pruning.py."""
    try:
        run_dir.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        limits = Limits.of(run_dir.logs, options.logs_max_age_s, options.logs_max_bytes)
        count, size_bytes = prune(run_dir.logs, living, limits, time.time())
    except OSError as error:
        logger.error("cannot look after the workers' logs: %s", error)
        return
    if count:
        logger.warning("removed the logs of %d ended workers (%d bytes)", count, size_bytes)


def _wall_clock_us() -> int:
    return time.time_ns() // 1000


def installed_version() -> str:
    try:
        return metadata.version("unicrond")
    except metadata.PackageNotFoundError:
        return "unknown"
