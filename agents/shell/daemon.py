"""The agent of one node: composes its keepers behind the ports of shell.py, starts them and ends them in order.

Rules
-----
* What the core asks for is handed to the keeper that does it; what a keeper sees is fed to the core. Where two keepers
  are concerned, here is their order, and nothing else.
* A keeper knows the agent as a Shell, and of the other keepers only those that it is given when it is made.
* At the end the duties stop first, NATS among them; then what they used, the workers' connections before the rest.
* The workers outlive any failure of the agent.

The keepers: process_keeper.py, stack_keeper.py, memory_keeper.py, memberships.py, health_keeper.py, worker_output.py,
node_queries.py, event_log_keeper.py, departure.py (signals and exit codes). What is decided: core/.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from importlib import metadata

import msgspec

from unicrond.agents.accelerators.driver import GpuDriver, gpu_type
from unicrond.agents.accelerators.watch import open_driver
from unicrond.agents.core.agent_config import AgentConfig
from unicrond.agents.core.state import (
    Action,
    Append,
    CopyState,
    ForkServerDied,
    InjectIntoNode,
    Input,
    NodeFaultInjected,
    Remembered,
    RunCheck,
    StateHeld,
    TakeStacks,
)
from unicrond.agents.health.link_probe import LinkProber
from unicrond.agents.protocol.gpus import visible_gpus
from unicrond.agents.protocol.messages import (
    FromForkServer,
    GroupMembership,
    Kill,
    ProcessExited,
    ReleaseMemory,
    ToForkServer,
    ToWorker,
)
from unicrond.agents.protocol.peers import plain, write_schema
from unicrond.agents.shell import probe
from unicrond.agents.shell.departure import Departure
from unicrond.agents.shell.event_log_keeper import EventLogKeeper
from unicrond.agents.shell.health_keeper import HealthKeeper, findings_here
from unicrond.agents.shell.memberships import Memberships, credentials_of
from unicrond.agents.shell.memory_keeper import MemoryKeeper, memory_bytes, regions_most
from unicrond.agents.shell.node_queries import NodeQueries
from unicrond.agents.shell.options import Options
from unicrond.agents.shell.outbox import Outbox
from unicrond.agents.shell.process_keeper import KillWatch, ProcessKeeper
from unicrond.agents.shell.progress_watch import MarkFiles
from unicrond.agents.shell.run_dir import BadRunDir, RunDir
from unicrond.agents.shell.shell import Shell
from unicrond.agents.shell.stack_keeper import StackKeeper
from unicrond.agents.shell.worker_output import WorkerOutput, make_room
from unicrond.events.host.optional_dependencies import is_installed
from unicrond.events.host.systemd import Systemd
from unicrond.events.vocabulary import ExitCause, NodeJoined, ProbeLinks, SnapshotStored, WorkerId
from unicrond.events.vocabulary.tasks import SCHEMES
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.events.wire.schemas import SCHEMA, told_version

logger = logging.getLogger("unicrond.agents")


class Agent(Shell):
    """Composes one node's agent of its keepers. `run` it once."""

    def __init__(self, options: Options, run_dir: RunDir) -> None:
        """Take the claimed `run_dir`; start nothing yet. Raise NoDriver, NoCgroup, BadCertificate."""
        self._options = options
        self._run_dir = run_dir
        self._boot = run_dir.next_boot(_wall_clock_us())
        with contextlib.suppress(OSError):  # then workers take it for an agent of the first schema
            write_schema(run_dir.path, self._boot)
        self._kills = KillWatch(run_dir)
        outbox = Outbox(options.node, self._boot, _wall_clock_us)
        driver = open_driver(options.accelerators, visible_gpus(), options.slots)
        super().__init__(self._config(driver), self._recall(), outbox, MarkFiles(run_dir.marks))
        state_max_bytes = memory_bytes(options) // regions_most(options)
        self._processes = ProcessKeeper(self, options, run_dir, self._kills, state_max_bytes, self._fork_server_died)
        self._departure = Departure(self, options, run_dir, self._processes, lambda: self._log.is_sure)
        credentials = credentials_of(options)
        self._memberships = Memberships(lambda: self.state.memory.memberships, credentials)
        self._memory = MemoryKeeper(
            options, run_dir, credentials, ask=self._processes.tell_fork_server, on_copy=self._copy_stored
        )
        self._health = HealthKeeper(self, options, run_dir, driver, self._processes)
        self._prober = LinkProber(options.node, options.address, self.feed)
        self._output = WorkerOutput(options, run_dir, lambda: self.state.memory.workers)
        self._stacks = StackKeeper(options.node, self._processes.questions, MarkFiles(run_dir.marks), self.feed)
        queries = NodeQueries(self, run_dir, self._processes, self._health, self._memberships)
        self._log = EventLogKeeper(self, options, run_dir, self._departure, queries)
        self._was_ready = False

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
            domain=options.domain,
            object_stores=SCHEMES if is_installed("fsspec") and is_installed("s3fs") else (),
            vanished=self._kills.cause_since_last_agent(),
        )

    async def run(self) -> int:
        """Work until a signal or until the node has left; return the exit code."""
        self._departure.heed_signals()
        await self._processes.start()
        probes = await probe.serve(self._run_dir.probe_socket, self.condition)
        config = msgspec.structs.replace(self.state.config, probe_port=await self._prober.serve())
        if service := self._memory.serve():
            config = msgspec.structs.replace(config, memory=service)
        self.state = msgspec.structs.replace(self.state, config=config)
        logger.info("agent of %s: boot %d, run directory %s", self._options.node, self._boot, self._run_dir.path)
        linking = asyncio.create_task(self._processes.keep_fork_server(), name="fork-link")
        serving = asyncio.create_task(self._log.run(), name="nats")
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
            await self._stacks.close()
            await self._health.stop_watching()
            await self._processes.close()
            await self._output.close()
            probes.close()
            await self._memory.close()
            self.close()
            await self._health.close()
            await self._prober.close()
            self._departure.ignore_signals()
        return self._departure.exit_code()

    def condition(self) -> probe.Condition:
        """Return what this agent does or waits for, for probes and systemd."""
        condition = self._condition()
        self._was_ready |= condition.is_ready
        return condition._replace(is_new=not self._was_ready)

    def _condition(self) -> probe.Condition:
        if self.state.phase in ("draining", "leaving", "left"):
            return probe.Condition(is_ready=False, status="leaves")
        if trouble := self._processes.trouble or self._log.trouble:
            return probe.Condition(is_ready=False, status=trouble)
        has_joined = self.has_joined.is_set() and self._log.is_sure
        return probe.Condition(is_ready=has_joined, status="joined" if has_joined else "waits for the log")

    def _status(self) -> str:
        return self.condition().status

    # --- the ports of the shell ------------------------------------------------------------------

    def now_us(self) -> int:
        """Return the wall clock's time in microseconds since the epoch."""
        return _wall_clock_us()

    def remember(self, memory: Remembered) -> None:
        """Write down what the next agent must know. A disk that refuses is logged, and the agent goes on."""
        try:
            self._run_dir.remember(memory)
        except OSError as error:
            logger.error("cannot write the agent's memory (%s): if this agent dies now, the next knows less", error)

    def core_failed(self, agent_input: Input) -> None:
        """Log the core's exception and end `run`; the workers stay."""
        logger.critical("the core failed on %r: the agent ends, its workers stay", agent_input, exc_info=True)
        self._departure.fail()

    def do(self, action: Action) -> None:
        """Carry out the action; log what is appended, and watch the GPUs once the node has joined."""
        if isinstance(action, Append):
            logger.info("%s", action.event.sentence())
        super().do(action)
        if isinstance(action, Append) and isinstance(action.event, NodeJoined):
            self._health.watch_accelerators()

    def tell_worker(self, worker: WorkerId, message: ToWorker) -> None:
        """Send the message, a membership with this node's passes to its peers."""
        message = plain(message)
        if isinstance(message, GroupMembership):
            message = self._memberships.for_worker(worker, message)
        self._processes.tell_worker(worker, message)

    def tell_fork_server(self, message: ToForkServer) -> None:
        """Send the message; drop the states of a task whose memory is released. A SIGKILL waits for the stack of its
        worker, where that is being read."""
        if isinstance(message, Kill) and message.signal == signal.SIGKILL and self._stacks.is_reading(message.worker):
            self._stacks.when_read(message.worker, lambda: self._processes.tell_fork_server(message))
            return
        self._processes.tell_fork_server(message)
        if isinstance(message, ReleaseMemory):
            self._memory.drop(message.task)

    def copy(self, order: CopyState) -> None:
        """Copy a state to a peer, under the warrant of the task's membership."""
        self._memory.copy(order, self._memberships.warrant(order.task))

    def inject_into_node(self, order: InjectIntoNode) -> None:
        """Inject an ordered fault, and feed NodeFaultInjected."""
        self.feed(NodeFaultInjected(command_id=order.command_id, reason=self._health.inject(order.fault)))

    def check(self, order: RunCheck) -> None:
        """Check the node's health, and feed Checked."""
        self._health.check(order)

    def probe(self, order: ProbeLinks) -> None:
        """Probe the links to other nodes, and feed LinksProbed."""
        self._prober.probe(order)

    def take_stacks(self, order: TakeStacks) -> None:
        """Read the stacks, and feed StacksTaken."""
        self._stacks.take(order)

    def disconnect(self, worker: WorkerId, reason: str) -> None:
        """Close a worker's connection."""
        self._processes.disconnect(worker, reason)

    def finish(self) -> None:
        """End the agent: the node has left."""
        self._departure.leave()

    def log_tail(self, worker: WorkerId) -> str:
        """Return the end of a worker's log."""
        return self._output.log_tail(worker)

    def snapshots(self) -> list[SnapshotStored]:
        """Return the states in the node's memory when a fork server greets."""
        return self._memory.states()

    def fork_server_said(self, message: FromForkServer) -> None:
        """Handle a message of the fork server: update the memory regions and the output of ended workers first."""
        self._memory.fork_server_said(message, self._processes.fork_server_pid)
        if isinstance(message, ProcessExited):
            self._output.ended(message.worker)
        super().fork_server_said(message)

    def take(self, recorded: RecordedEvent) -> None:
        """Log an entry of the node's feed and handle it."""
        logger.info("%s: %s", recorded.envelope.event_id, recorded.envelope.event.sentence())
        super().take(recorded)

    def superseded(self, boot: int) -> None:
        """Look for the later agent that a command is for: it is heard soon, or there is none."""
        self._log.look_for_agent(boot)

    def _copy_stored(self, state: SnapshotStored) -> None:
        self.feed(StateHeld(snapshot=state))

    def _fork_server_died(self, cause: ExitCause) -> None:
        self._memory.fork_server_died()
        self.feed(ForkServerDied(cause=cause))

    def _recall(self) -> Remembered:
        try:
            return self._run_dir.recall()
        except BadRunDir as error:
            logger.error("%s; the fork server's inventory says which workers live", error)
            return Remembered()


async def run_agent(options: Options) -> int:
    """Claim the run directory and work in it until the end; return the exit code. Raise BadRunDir, NoDriver,
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
    """Return the version of the installed package, "unknown" where it is not installed."""
    try:
        return metadata.version("unicrond")
    except metadata.PackageNotFoundError:
        return "unknown"
