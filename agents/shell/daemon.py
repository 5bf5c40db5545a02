"""The node agent's shell: clocks, sockets, signals and NATS behind the ports of shell.py.

Ends
----
* SIGTERM: the node is drained within `grace_s`, then it leaves; a second one changes nothing. With `hand_over` (a
  restart): the agent goes, fork server and workers stay for the next one.
* SIGINT: the node leaves, without a drain; again: at once. Workers, store and fork server end before the agent.
* Exit codes: cli.py. What a signal ended is not 0: a place that is to be filled would count as done.
* A newer agent of the same name (duplicate_agent.py): exit code EXIT_SUPERSEDED, the workers end; a later boot in the
  log that no agent has: exit code 1, and the next boot is above it.
* Told by the coordinator to leave for good: drained, exit code 0. Forgotten while it was away: its workers end, exit
  code EXIT_FORGOTTEN; its supervisor starts the next one.
* Anything unexpected: exit code 1 with a traceback; the agent's supervisor starts the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from unicrond.agents.accelerators.diagnosis import GpuFinding
from unicrond.agents.accelerators.driver import Choice
from unicrond.agents.accelerators.gpu_type import gpu_type
from unicrond.agents.accelerators.watch import AcceleratorWatch, open_driver
from unicrond.agents.core.agent_config import AgentConfig
from unicrond.agents.core.known_event_log import difference
from unicrond.agents.core.state import (
    AcceleratorSaw,
    Action,
    Append,
    CopyState,
    Drain,
    ForkServerDied,
    HandOver,
    HeldState,
    InjectIntoNode,
    Input,
    LeaveNow,
    LogSeen,
    MachineSaw,
    NodeFaultInjected,
    Remembered,
    RunCheck,
    StateHeld,
    Unreadable,
    WorkerDisconnected,
    WorkerSaid,
)
from unicrond.agents.fork_server.limits import Limit
from unicrond.agents.health import preflight
from unicrond.agents.health.doctor_checks import Checks
from unicrond.agents.health.health_check import Health
from unicrond.agents.health.node_faults import NodeFaults
from unicrond.agents.host import host_resources as host
from unicrond.agents.host import oom_kill_counts as kill_counts
from unicrond.agents.host.cgroup_root import NoCgroup, own_cgroup, prepare
from unicrond.agents.host.output_layout import worker_log
from unicrond.agents.host.rotated_output import tail
from unicrond.agents.host.task_users import not_separated, visible_environment
from unicrond.agents.kubernetes.place import NodeObject
from unicrond.agents.memory.copies import StateCopier
from unicrond.agents.memory.regions import MemoryRegions
from unicrond.agents.memory.server import MemoryServer
from unicrond.agents.output.flight_recorders import Flights
from unicrond.agents.output.output_mirror import OutputMirror
from unicrond.agents.output.output_pruning import Limits, prune
from unicrond.agents.output.query_service import answer
from unicrond.agents.protocol.flight import Flight
from unicrond.agents.protocol.gpus import visible_gpus
from unicrond.agents.protocol.identity import Identity
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.memory_exchange import TLS
from unicrond.agents.protocol.messages import (
    Exited,
    FromForkServer,
    FromWorker,
    GroupMembership,
    Hello,
    Inventory,
    MemoryReserved,
    ReleaseMemory,
    ReserveFailed,
    ToForkServer,
    ToWorker,
)
from unicrond.agents.protocol.peers import plain, write_schema
from unicrond.agents.shell import probe
from unicrond.agents.shell.duplicate_agent import EXIT_SUPERSEDED, DuplicateAgents, DuplicateWatch
from unicrond.agents.shell.event_log_guard import LogGuard
from unicrond.agents.shell.fork_server_link import ForkLink
from unicrond.agents.shell.outbox import Outbox
from unicrond.agents.shell.progress_watch import MarkFiles
from unicrond.agents.shell.run_dir import BadRunDir, RunDir
from unicrond.agents.shell.shell import Shell
from unicrond.agents.shell.worker_sockets import WorkerSockets
from unicrond.events.host.masking import PATTERN_MASK, REACH_BYTES
from unicrond.events.host.systemd import Systemd
from unicrond.events.nats.commands import NatsCommandFeed, UnreadCommand
from unicrond.events.nats.connection import Connection, Login
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.terms import Terms
from unicrond.events.queries.finding import Finding
from unicrond.events.queries.worker_queries import logs_subject
from unicrond.events.trust.keys import BadKey, read_key
from unicrond.events.vocabulary import CoordinatorStarted, Gpu, MemoryService, Name, NodeJoined, WorkerId
from unicrond.events.wire.envelope import Recorded
from unicrond.events.wire.schemas import SCHEMA, spoken_schema, told_version

if TYPE_CHECKING:
    from unicrond.agents.memory.peer_tokens import Credentials  # needs an extra, and so does what it imports

logger = logging.getLogger("unicrond.agents")

#: Of an agent whose node was forgotten while it was away: the next one joins anew.
EXIT_FORGOTTEN = 5
#: How much of a log goes with an unexpected exit.
LOG_TAIL_BYTES = 4096
_DRAIN_TIMEOUT_S = 5.0
_RETIRE_TIMEOUT_S = 10.0
#: Of the grace time, what is kept for ending workers that the coordinator has not moved away, and for the last words.
_END_S = 5.0
_PRUNE_EVERY_S = 60.0
_COUNT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a person chooses (cli.py). `fork_server_arguments`: further flags of unicrond.agents.fork_server.server.

    `grace_s`: from SIGTERM to the end, unless `hand_over`: then SIGTERM leaves the workers to the next agent.
    `memory_bytes`: for states of training; None: a quarter of what may be used (host.py), 0: none. `accelerators`: the
    source of their health. `gpu_type`: "": as the driver has it. `logs_dir`: of workers; None: in the
    run directory. `shows_output`: on stdout too (output_mirror.py). `logs_max_age_s`, `logs_max_bytes`:
    None: see output_pruning.py. `states_in_clear`: between nodes, though the node's key carries a certificate. `users`:
    that tasks may run as (task_users.py). `limits`: of each worker. `cgroup`: where workers get cgroups of their own;
    None: this process's. `pass_env`: further variables that tasks of `users` may see. `only_checks`: join nothing
    (preflight.py). `supervise`: keep an agent in a process of its own (events/host/init_process.py). `new_log`: begin
    on whatever log there is (event_log_guard.py). `kubernetes`: the machine's Node object, None: there is none
    (kubernetes/).
    """

    nats: tuple[str, ...]
    node: Name
    slots: int
    address: str = "127.0.0.1"
    run_dir: Path
    heartbeat_s: float = 1.0
    lease_s: float = 60.0
    grace_s: float = 25.0
    hand_over: bool = False
    login: Login = field(default_factory=Login)
    memory_bytes: int | None = None
    logs_dir: Path | None = None
    shows_output: bool = False
    logs_max_age_s: float | None = None
    logs_max_bytes: int | None = None
    accelerators: Choice = "auto"
    gpu_type: Gpu = ""
    states_in_clear: bool = False
    users: tuple[Identity, ...] = ()
    limits: tuple[Limit, ...] = ()
    cgroup: Path | None = None
    pass_env: tuple[str, ...] = ()
    only_checks: bool = False
    supervise: bool = False
    new_log: bool = False
    kubernetes: NodeObject | None = None
    fork_server_arguments: tuple[str, ...] = ()


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
        self._superseded_by = 0
        #: Of two looks, the older first: a kill is counted a little before its end is seen.
        self._kills = (kill_counts.look(),) * 2
        outbox = Outbox(options.node, self._boot, _wall_clock_us)
        self._accelerator_driver = open_driver(options.accelerators, visible_gpus(), options.slots)
        super().__init__(self._config(), self._recall(), outbox, MarkFiles(run_dir.marks))
        self._sockets = WorkerSockets(
            run_dir.agent_socket,
            on_connected=self.worker_connected,
            on_message=self._worker_said,
            on_disconnected=self._worker_disconnected,
        )
        self._flights = Flights(self._sockets.send)
        self._link = ForkLink(
            run_dir,
            arguments=[
                *("--address", options.address),
                *("--lease-s", str(options.lease_s)),
                *("--memory-max-bytes", str(self._memory_bytes() // (2 * options.slots))),
                *self._separation(),
                *options.fork_server_arguments,
            ],
            on_message=self.fork_server_said,
            on_death=self._fork_server_died,
            environment=visible_environment(os.environ, options.pass_env) if options.users else os.environ,
            separates=bool(options.users),
        )
        # Each slot's own state, and as many copies of others'.
        self._regions = MemoryRegions(self._link.send, most=2 * options.slots)
        self._credentials = credentials_of(options)
        self._copies = StateCopier(options.node, self._regions, self._credentials)
        self._exchange_port, self._token = run_dir.exchange()
        self._memory_server = MemoryServer(
            self._regions, self._token, lambda held: self.feed(StateHeld(held_state=held)), self._credentials
        )
        self._accelerators: AcceleratorWatch | None = None
        self._node_faults = NodeFaults(self._link.kill, self._report_xid)
        self._health = Health(options.node, options.slots, options.accelerators, self.feed)
        self._checks = self._make_checks()
        self._connection: Connection | None = None
        self._guard: LogGuard | None = None
        self._mirror: OutputMirror | None = None
        self._over = asyncio.Event()
        self._is_left = False
        self._failed = False
        #: The first signal that asked for the end, and when it is to be over by the loop's clock.
        self._ended_by: signal.Signals | None = None
        self._ends_at_s = float("inf")

    def _config(self) -> AgentConfig:
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
            gpu=options.gpu_type or gpu_type(self._accelerator_driver.models if self._accelerator_driver else ()),
            vanished=kill_counts.cause(run_dir.recall_kills(), self._kills[1]),
        )

    async def run(self) -> int:
        """Work until a signal or until the node has left; the exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._hand_over if self._options.hand_over else self._drain)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        await self._sockets.start()
        probes = await probe.serve(self._run_dir.probe_socket, self.condition)
        self._serve_memory()
        logger.info("agent of %s: boot %d, run directory %s", self._options.node, self._boot, self._run_dir.path)
        linking = asyncio.create_task(self._link.run(), name="fork-link")
        serving = asyncio.create_task(self._serve_nats(), name="nats")
        duties = [
            linking,
            serving,
            asyncio.create_task(self._prune_logs(), name="logs"),
            asyncio.create_task(self._watch_kills(), name="kills"),
            asyncio.create_task(Systemd().accompany(self.has_inventory.wait(), self._status), name="systemd"),
        ]
        if self._options.shows_output:
            self._mirror = OutputMirror(self._run_dir.logs, lambda: tuple(self.state.memory.workers))
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
            if self._mirror is not None:
                await asyncio.to_thread(self._mirror.close)
            probes.close()
            self._memory_server.close()
            await self._copies.close()
            self.close()
            await self._health.close()
            await self._checks.close()
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)
        if self._superseded_by:
            return EXIT_SUPERSEDED
        if self.state.ends == "forgotten" and not self._ended_by:
            return EXIT_FORGOTTEN
        return 1 if self._failed else 128 + self._ended_by if self._ended_by else 0

    def condition(self) -> probe.Condition:
        """What this agent does or waits for, for probes and systemd."""
        if self.state.phase in ("draining", "leaving", "left"):
            return probe.Condition(is_ready=False, status="leaves")
        if not self._link.serves:
            return probe.Condition(is_ready=False, status=self._link.trouble or "waits for its fork server")
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
        self._failed = True
        self._over.set()

    def do(self, action: Action) -> None:
        """See Shell. Logs what is appended; the accelerators are watched once the node has joined."""
        if isinstance(action, Append):
            logger.info("%s", action.event.sentence())
        super().do(action)
        if isinstance(action, Append) and isinstance(action.event, NodeJoined):
            self._watch_accelerators()

    def worker_connected(self, hello: Hello) -> None:
        """See Shell."""
        self._flights.connected(hello)
        super().worker_connected(hello)

    def _worker_said(self, worker: WorkerId, message: FromWorker) -> None:
        if isinstance(message, Flight):  # an answer to a person, of which the core knows nothing
            self._flights.receive(worker, message)
        else:
            self.feed(WorkerSaid(worker=worker, message=message))

    def _worker_disconnected(self, worker: WorkerId) -> None:
        self._flights.disconnected(worker)
        self.feed(WorkerDisconnected(worker=worker))

    def tell_worker(self, worker: WorkerId, message: ToWorker) -> None:
        """See Shell. A membership goes with this node's passes to its peers."""
        message = plain(message)
        if isinstance(message, GroupMembership):
            task, own = worker.rpartition(".")[0], self._credentials
            bare = msgspec.structs.replace(message, warrant="")
            message = own.with_passes(message, task, datetime.now(UTC)) if own else bare
        self._sockets.send(worker, message)

    def tell_fork_server(self, message: ToForkServer) -> None:
        """See Shell."""
        self._link.send(plain(message, self._link.schema))
        if isinstance(message, ReleaseMemory):
            self._regions.drop(message.task)

    def copy(self, order: CopyState) -> None:
        """See Shell."""
        membership = self.state.memory.memberships.get(order.task)
        self._copies.copy(order.task, order.shard, order.peers, membership.warrant if membership else "")

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
        """See Shell. At most LOG_TAIL_BYTES bytes, of which secrets are blotted out; those that are not UTF-8 are
        replaced."""
        path = worker_log(self._run_dir.logs, worker.rpartition(".")[0], worker)
        masked = PATTERN_MASK.overwrite(tail(path, LOG_TAIL_BYTES + REACH_BYTES))
        return masked[-LOG_TAIL_BYTES:].decode(errors="replace")

    def held_states(self) -> list[HeldState]:
        """See Shell."""
        return self._regions.states(self._options.node)

    def fork_server_said(self, message: FromForkServer) -> None:
        """See Shell. The memory regions follow what the fork server holds."""
        if isinstance(message, Inventory):
            self._regions.set_inventory(self._link.pid, message.kept)
        elif isinstance(message, MemoryReserved | ReserveFailed):
            self._regions.receive(message)
        elif isinstance(message, Exited) and self._mirror is not None:
            self._mirror.ended(message.worker)
        super().fork_server_said(message)
        if isinstance(message, Exited) and not self.state.memory.workers:
            self._link.renew()

    def _fork_server_died(self) -> None:
        self._regions.set_inventory(0, ())
        self.feed(ForkServerDied(cause=kill_counts.cause(self._kills[0], kill_counts.look())))

    async def _watch_kills(self) -> None:
        """Write down the counts whenever they are others than before."""
        written = None
        while True:
            self._kills = self._kills[1], kill_counts.look()
            if self._kills[1] != written:
                written = self._kills[1]
                with contextlib.suppress(OSError):  # then the next agent knows less
                    self._run_dir.remember_kills(written)
            await asyncio.sleep(_COUNT_EVERY_S)

    # --- separation ------------------------------------------------------------------------------

    def _separation(self) -> list[str]:
        """Flags of the fork server. Says what is not separated. Raises NoCgroup where a limit needs one."""
        options = self._options
        lacks, flags = "", [f"--limit={limit}" for limit in options.limits]
        if options.users:
            flags.append("--separate")
            of_cgroups = [limit.name for limit in options.limits if limit.resource < 0]
            try:
                flags += ["--cgroup", str(prepare(options.cgroup or own_cgroup(), options.node, of_cgroups))]
            except NoCgroup as error:
                if options.cgroup or of_cgroups:
                    raise
                lacks = str(error)
        for sentence in not_separated(options.users, lacks):
            logger.warning("not separated: %s", sentence)
        return flags

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
        token = TLS if self._credentials else self._token
        service = MemoryService(node=options.node, host=options.address, port=self._memory_server.port, token=token)
        config = msgspec.structs.replace(self.state.config, memory=service)
        self.state = msgspec.structs.replace(self.state, config=config)

    # --- accelerators ----------------------------------------------------------------------------

    def _watch_accelerators(self) -> None:
        """From when the log knows the node and its workers: an earlier report would mean nothing to readers."""
        if self._accelerator_driver and not self._accelerators:
            self._accelerators = AcceleratorWatch(self._accelerator_driver, self._workers_by_slot, self._found)

    def _workers_by_slot(self) -> dict[int, WorkerId]:
        return {record.slot: worker for worker, record in self.state.memory.workers.items() if not record.foreign}

    def _make_checks(self) -> Checks:
        options = self._options
        return Checks(
            options.node,
            options.address,
            lambda: findings_here(options),
            self._link.sum,
            self._run_dir.sum_socket,
            self._free_gpus,
            runs_as_others=bool(options.users),
        )

    def _free_gpus(self) -> list[str]:
        """Those of slots that no worker has."""
        taken = {record.slot for record in self.state.memory.workers.values()}
        return [gpu for slot, gpu in enumerate(visible_gpus()) if slot not in taken]

    def _found(self, accelerator: str, worker: str, finding: GpuFinding) -> None:
        self.feed(
            AcceleratorSaw(
                accelerator=accelerator,
                worker=worker,
                kind=finding.kind,
                xid=finding.xid,
                message=finding.message,
                needs=finding.needs,
                predicts_failure=finding.predicts_failure,
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
                connection, node, self._namesakes, self._look_for_namesakes, self._superseded, self._outrun
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
            outbox_backlog, outbox_backlog_us = self.outbox.backlog(time.monotonic())
            envelope = self.beat(
                load_milli=host.load_milli(),
                memory_free_bytes=host.memory_free_bytes(),
                outbox_backlog=outbox_backlog,
                outbox_backlog_us=outbox_backlog_us,
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
            if self._checks.begin(data, respond):
                return
            with contextlib.suppress(Exception):  # a requester that has gone does not concern this agent
                logs, flight = self._run_dir.logs, self._flights.ask
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

    def _drain(self) -> None:
        if self._ended_by is not None:
            logger.info("%s again: the node is leaving already", signal.SIGTERM.name)
            return
        self._ended_by, grace_s = signal.SIGTERM, self._options.grace_s
        self._ends_at_s = asyncio.get_running_loop().time() + grace_s
        logger.info("SIGTERM: the node is drained, then it leaves, within %g s", grace_s)
        self.feed(Drain(reason="its agent was asked to end", limit_s=grace_s - min(_END_S, grace_s / 2)))

    def _hand_over(self) -> None:
        self._ended_by = self._ended_by or signal.SIGTERM
        logger.info("SIGTERM: this agent ends; its workers stay for the next one, at most %g s", self._options.lease_s)
        self.feed(HandOver())
        self._over.set()

    def _interrupted(self) -> None:
        self._ended_by = self._ended_by or signal.SIGINT
        if self.state.phase == "leaving":
            logger.warning("SIGINT again: not waiting for the workers")
            self._is_left = True
            self._over.set()
            return
        logger.info("SIGINT: ending the workers, then the node leaves (again: at once)")
        self.feed(LeaveNow(reason="the agent was interrupted"))

    async def _finish(self, linking: asyncio.Task[None]) -> None:
        """What is still to be done before the connections go."""
        if self._superseded_by:  # the log takes nothing of ours
            if self._run_dir.belongs_to(self._superseded_by):
                logger.warning("the newer agent works in %s too and keeps the workers", self._run_dir.path)
                return
            await self._retire(linking)
            return
        if not await self.outbox.drained(self._at_most_s(_DRAIN_TIMEOUT_S)):
            logger.error("%d observations did not reach the log in time and were lost", len(self.outbox))
        if self._is_left:
            await self._retire(linking)

    async def _retire(self, linking: asyncio.Task[None]) -> None:
        """End the workers, the store and the fork server."""
        self._link.retire()
        if not (await asyncio.wait([linking], timeout=self._at_most_s(_RETIRE_TIMEOUT_S)))[0]:
            logger.error("the fork server does not end; see %s", self._run_dir.fork_server_log)

    def _at_most_s(self, wanted_s: float) -> float:
        """`wanted_s`, or what is left of the grace time; half a second at least."""
        return max(0.5, min(wanted_s, self._ends_at_s - asyncio.get_running_loop().time()))


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


def findings_here(options: Options) -> list[Finding]:
    """As `node_findings`; none where all is on one machine: there most of it is meant."""
    is_alone = not preflight.is_remote(options.nats) and preflight.is_loopback(options.address)
    return [] if is_alone else node_findings(options)


def node_findings(options: Options) -> list[Finding]:
    """What is likely to go wrong on this node. Raises BadKey."""
    asked = preflight.NodeFlags(
        slots=options.slots,
        address=options.address,
        run_dir=options.run_dir,
        logs_dir=options.logs_dir or options.run_dir,
        memory_bytes=options.memory_bytes,
        nats_is_remote=preflight.is_remote(options.nats),
    )
    key = read_key(options.login.key) if options.login.key else None
    return preflight.findings(asked, preflight.look(asked, key))


def credentials_of(options: Options) -> Credentials | None:
    """Of the node, where its key carries a certificate and states do not travel in clear by order. Raises
    BadCertificate."""
    from unicrond.agents.memory.peer_tokens import Credentials
    from unicrond.events.trust.certificates import BadCertificate

    path = options.login.key
    if options.states_in_clear or path is None:
        return None
    try:
        key = read_key(path)
        return Credentials(key, path) if key.has_certificate else None
    except (BadKey, BadCertificate) as error:
        raise BadCertificate(f"{path}: its certificate cannot be used ({error}); enroll the node again") from None


def make_room(options: Options, run_dir: RunDir) -> None:
    """Where the volume is full, logs of ended workers go before anything is written."""
    usage = shutil.disk_usage(run_dir.path)
    if usage.free >= Limits.of(run_dir.path, None, None).reserve_bytes:
        return
    logger.error("the volume of %s is full (%d of %d bytes free)", run_dir.path, usage.free, usage.total)
    with contextlib.suppress(BadRunDir):  # without the memory this agent does not know which workers live
        prune_logs(options, run_dir, frozenset(run_dir.recall().workers))


def prune_logs(options: Options, run_dir: RunDir, living: frozenset[WorkerId]) -> None:
    """See output_pruning.py."""
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
