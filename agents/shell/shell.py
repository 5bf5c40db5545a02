"""Runs the agent's pure core with real or simulated IO: feeds it inputs and carries out its actions.

Rules
-----
* Everything that happens becomes an input to `core.handle` in one place, `feed`; every action of the core is carried
  out in one place, `do`. Both run in the event loop and never wait, so inputs are handled one after another.
* What the next agent must know is written down before anything is done.
* The connections to the outside are ports: the abstract methods. `daemon.py` and its keepers implement them by
  sockets, files and NATS, the simulator by models of these, which it kills at every point.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any, assert_never

from msgspec.structs import replace

from unicrond.agents.core import floods
from unicrond.agents.core import machine as core
from unicrond.agents.core.agent_config import AgentConfig
from unicrond.agents.core.known_event_log import difference, entries_behind
from unicrond.agents.core.state import (
    Action,
    Append,
    Appended,
    ArmTimer,
    Commanded,
    CopyState,
    Disconnect,
    Finish,
    ForgetLog,
    ForkServerSaid,
    InjectIntoNode,
    Input,
    LogDecision,
    LogSeen,
    Remembered,
    RunCheck,
    Stalled,
    StateHeld,
    TakeStacks,
    TellForkServer,
    TellWorker,
    TimerFired,
    WorkerConnected,
)
from unicrond.agents.core.worker_budgets import ReportDrops
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import FromForkServer, Hello, Inventory, ProcessExited, ToForkServer, ToWorker
from unicrond.agents.shell.outbox import Outbox
from unicrond.agents.shell.progress_watch import ProgressWatch, Signs
from unicrond.events.log.event_log import BROADCAST_TYPES, CommandFeed
from unicrond.events.vocabulary import (
    Command,
    Heartbeat,
    NodeJoined,
    ProbeLinks,
    SnapshotStored,
    StartWorker,
    StartWorkers,
    WorkerId,
)
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import lowered

logger = logging.getLogger(__name__)


class Shell(ABC):
    """Runs one agent's core. `memory`: what the agent before it has written down."""

    def __init__(self, config: AgentConfig, memory: Remembered, outbox: Outbox, signs: Signs) -> None:
        self.state = core.resume(config, memory)
        self.outbox = outbox
        self.watch = ProgressWatch(signs, self._late)
        #: Nothing goes in or out any more.
        self.closed = False
        self.has_inventory = asyncio.Event()
        self.has_joined = asyncio.Event()
        #: There is a command for a later agent of this node's name: nothing more is taken from the feed.
        self.is_superseded = False
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._beat = 0
        #: The last own beat that came back; 0: none has.
        self._echo_beat = 0

    # --- ports -----------------------------------------------------------------------------------

    @abstractmethod
    def now_us(self) -> int:
        """Return the wall clock's time in microseconds."""

    @abstractmethod
    def remember(self, memory: Remembered) -> None:
        """Write down what the next agent must know."""

    @abstractmethod
    def core_failed(self, agent_input: Input) -> None:
        """Report the core's exception; called while it is handled."""

    @abstractmethod
    def tell_worker(self, worker: WorkerId, message: ToWorker) -> None:
        """Send the message, where the worker is connected."""

    @abstractmethod
    def tell_fork_server(self, message: ToForkServer) -> None:
        """Send the message, where there is a fork server."""

    @abstractmethod
    def copy(self, order: CopyState) -> None:
        """Copy a state to a peer."""

    @abstractmethod
    def inject_into_node(self, order: InjectIntoNode) -> None:
        """Inject an ordered fault, and feed NodeFaultInjected."""

    @abstractmethod
    def check(self, order: RunCheck) -> None:
        """Check the node's health, and feed Checked."""

    @abstractmethod
    def probe(self, order: ProbeLinks) -> None:
        """Probe the links to other nodes, and feed LinksProbed."""

    @abstractmethod
    def take_stacks(self, order: TakeStacks) -> None:
        """Read the workers' stacks before a later message or signal moves them, and feed StacksTaken."""

    @abstractmethod
    def disconnect(self, worker: WorkerId, reason: str) -> None:
        """Close a worker's connection."""

    @abstractmethod
    def finish(self) -> None:
        """End the agent: the node has left."""

    @abstractmethod
    def superseded(self, boot: int) -> None:
        """Handle a command for a later agent of this node's name, which is to take it."""

    @abstractmethod
    def snapshots(self) -> Iterable[SnapshotStored]:
        """Return the states in the node's memory when a fork server greets."""

    def log_tail(self, worker: WorkerId) -> str:
        """Return the end of a worker's log."""
        return ""

    def acting(self, agent_input: Input, actions: Sequence[Action]) -> Sequence[Action]:
        """Return the actions to carry out, of those that the core asks for."""
        return actions

    def may_act(self, number: int) -> bool:
        """Return whether the action of that number, from 0, is still to be carried out."""
        return not self.closed

    # --- the one way in and the one way out ------------------------------------------------------

    def feed(self, agent_input: Input) -> None:
        """Let the core handle one input, write down what the next agent must know, and carry out the core's actions."""
        if self.closed:
            return
        before = self.state.memory
        try:
            self.state, actions = core.handle(self.state, agent_input)
        except Exception:
            self.core_failed(agent_input)
            return
        if self.state.memory is not before:
            self.remember(self.state.memory)
        for number, action in enumerate(self.acting(agent_input, actions)):
            if not self.may_act(number):
                return
            self.do(action)

    def do(self, action: Action) -> None:  # noqa: C901  # one case for each kind of action
        """Carry out one action of the core."""
        match action:
            case Append(event=event, caused_by=caused_by, confirm=confirm):
                on_durable = (lambda: self.feed(Appended(event=event))) if confirm else None
                self.outbox.put(event, caused_by=caused_by, on_durable=on_durable)
                if isinstance(event, NodeJoined):
                    self.has_joined.set()
            case TellWorker(worker=worker, message=to_worker):
                self.tell_worker(worker, to_worker)
            case TellForkServer(message=to_fork_server):
                self.tell_fork_server(to_fork_server)
            case CopyState():
                self.copy(action)
            case ArmTimer(name=name, key=key, after_s=after_s):
                if running := self._timers.pop((name, key), None):
                    running.cancel()
                fired = TimerFired(name=name, key=key)
                self._timers[name, key] = asyncio.get_running_loop().call_later(after_s, self._fire, fired)
            case InjectIntoNode():
                self.inject_into_node(action)
            case RunCheck():
                self.check(action)
            case ProbeLinks():
                self.probe(action)
            case TakeStacks():
                self.take_stacks(action)
            case Disconnect(worker=worker, reason=reason):
                self.disconnect(worker, reason)
            case ReportDrops(worker=worker, counts=counts):
                kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
                logger.warning("%s says more than goes on to the log; dropped or replaced: %s", worker, kinds)
            case ForgetLog():
                self.outbox.forget()
                self.has_joined.clear()
            case Finish():
                self.finish()
            case _ as never:
                assert_never(never)

    def close(self) -> None:
        """Stop all timers and the watch over the marks."""
        self.watch.close()
        for timer in self._timers.values():
            timer.cancel()

    def _fire(self, fired: TimerFired) -> None:
        self._timers.pop((fired.name, fired.key), None)
        self.feed(fired)

    def _late(self, worker: WorkerId, mark: Mark, still_us: int, is_stopped: bool, times: int) -> None:
        self.feed(Stalled(worker=worker, mark=mark, still_us=still_us, is_stopped=is_stopped, times=times))

    # --- incoming messages -------------------------------------------------------------------------

    def worker_connected(self, hello: Hello) -> None:
        """Handle a worker's greeting."""
        self.feed(WorkerConnected(hello=hello))
        if hello.worker in self.state.memory.workers and not self.closed:
            self.watch.follow(hello.worker, hello.pid)

    def fork_server_said(self, message: FromForkServer) -> None:
        """Handle a message of the fork server; an inventory is followed by the states in memory."""
        log_tail, mark = "", None
        if isinstance(message, Inventory):
            self.has_inventory.set()
        elif isinstance(message, ProcessExited):
            log_tail, mark = self.log_tail(message.worker), self.watch.drop(message.worker)
        self.feed(ForkServerSaid(message=message, log_tail=log_tail, mark=mark))
        if isinstance(message, Inventory) and not self.closed:
            for entry in message.workers:  # a worker that hangs sends no hello to a new agent
                self.watch.follow(entry.worker, entry.pid)
            for state in list(self.snapshots()):
                self.feed(StateHeld(snapshot=state))

    @property
    def read_seq(self) -> int:
        """Return the last entry of the feed that was handled; 0: not known."""
        return self.state.memory.read_seq

    def begin_reading(self, log: LogSeen) -> int:
        """Return the entry of this log behind which the feed begins, and note it for the beats."""
        after_seq = entries_behind(self.state.memory, log)
        if after_seq:
            self._note_read(after_seq)
        return after_seq

    def _note_read(self, seq: int) -> None:
        """Note the last entry that was handled; it is written down with what is remembered next. One that comes again
        takes nothing back."""
        read_seq = max(seq, self.state.memory.read_seq)
        self.state = replace(self.state, memory=replace(self.state.memory, read_seq=read_seq))

    def tasks_here(self, log: LogSeen | None = None) -> frozenset[str]:
        """Return the tasks that have a worker here, or will have one.

        `log`: the one that answers now. The tasks that another log started do not count for it, and end as soon as the
        core has seen it.
        """
        memory = self.state.memory
        if log is not None and difference(memory, log):
            return frozenset()
        running = frozenset(worker.task for worker in memory.workers.values() if not worker.foreign)
        return running | {waiting.command.spec.name for waiting in memory.waiting_starts}

    async def take_entries(self, feed: CommandFeed) -> None:
        """Handle the entries of the feed, and follow their tasks, without end.

        A task is followed before the command to start its first worker here is acknowledged, so that no later entry
        about it is missed; the tasks that are followed already are repeated then, since another agent of this name may
        have changed them. A task without a worker here is given up with the next entry.
        """
        followed = self.tasks_here()
        async with aclosing(feed.read()) as entries:
            async for recorded in entries:
                event = recorded.envelope.event
                starting = {event.spec.name} if isinstance(event, StartWorker | StartWorkers) else set()
                tasks = self.tasks_here() | starting
                if starting or tasks != followed:
                    await feed.follow(tasks)
                    followed = tasks
                self.take(recorded)
                if self.closed or self.is_superseded:
                    return  # unfinished entries come again, to the next agent
                self._note_read(recorded.seq)

    def take(self, recorded: RecordedEvent) -> None:
        """Handle one entry of the node's feed."""
        envelope, event, warrant = recorded.envelope, recorded.envelope.event, recorded.warrant
        if isinstance(event, Command):
            if event.agent_boot > self.state.config.agent_boot:
                self.is_superseded = True
                self.superseded(event.agent_boot)
                return
            age_s = max(0.0, (self.now_us() - recorded.recorded_at_us) / 1e6)
            cause = envelope.event_id
            self.feed(Commanded(command=event, term=envelope.term, cause=cause, age_s=age_s, warrant=warrant))
        elif isinstance(event, BROADCAST_TYPES):
            self.feed(LogDecision(event=event, term=envelope.term, warrant=warrant, seq=recorded.seq))

    # --- reports now and then --------------------------------------------------------------------

    def heard_own_beat(self, beat: int) -> None:
        """Note that NATS has given an own beat back."""
        self._echo_beat = max(self._echo_beat, beat)

    def hears_anew(self) -> None:
        """Note that a connection has begun, or is away: the beats before it come back no more."""
        if self._echo_beat:
            self._echo_beat = self._beat

    def beat(self, **load: Any) -> Envelope:
        """Return the next heartbeat. `load`: further fields of Heartbeat."""
        self._beat += 1
        config = self.state.config
        workers = len(self.state.memory.workers)
        dropped_count, flooding_worker = floods.worst(self.state)
        beat = Heartbeat(
            node=config.node,
            agent_boot=config.agent_boot,
            beat=self._beat,
            workers=workers,
            read_seq=self.read_seq,
            echo_beat=self._echo_beat,
            dropped_messages=dropped_count,
            flooding_worker=flooding_worker,
            **load,
        )
        return Envelope(
            producer=config.node,
            boot=config.agent_boot,
            number=self._beat,
            observed_at_us=self.now_us(),
            event=lowered(beat, self.outbox.schema) or beat,
        )
