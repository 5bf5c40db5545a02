"""What surrounds the agent's pure core on every machine, the real one and the simulated one.

Rules
-----
* Everything that happens becomes an input to `core.handle` in one place, `feed`; everything that the core asks for is
  done in one place, `do`. Both run in the event loop and never wait, so inputs are handled one after another.
* What the next agent must know is written down before anything is done.
* The lines to the outside are ports: the abstract methods. `daemon.py` has sockets, files and NATS behind them, the
  simulator models of these, which it kills at every point.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any, assert_never

from agents import core
from agents.agent_config import Config
from agents.known_log import difference
from agents.outbox import Outbox
from agents.protocol.marks import Mark
from agents.protocol.messages import Exited, FromForkServer, Hello, Inventory, ToForkServer, ToWorker
from agents.state import (
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
    Held,
    InjectIntoNode,
    Input,
    LogSeen,
    Remembered,
    RunCheck,
    Stalled,
    StateHeld,
    TellForkServer,
    TellWorker,
    TimerFired,
    Told,
    WorkerConnected,
)
from agents.watch import Signs, Watch
from events.envelope import Envelope, Recorded
from events.log import TOLD, CommandFeed
from events.schemas import lowered
from events.vocabulary import Command, Heartbeat, NodeJoined, StartWorker, StartWorkers, WorkerId


class Shell(ABC):
    """One agent around its core. `memory`: what the agent before it has written down."""

    def __init__(self, config: Config, memory: Remembered, outbox: Outbox, signs: Signs) -> None:
        self.state = core.resume(config, memory)
        self.outbox = outbox
        self.watch = Watch(signs, self._late)
        #: Nothing goes in or out any more.
        self.closed = False
        self.has_inventory = asyncio.Event()
        self.has_joined = asyncio.Event()
        #: A later agent of this node's name is commanded: nothing more is taken from the feed.
        self.is_outlived = False
        #: The last entry of its feed that was handled.
        self.read_seq = 0
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._beat = 0

    # --- ports -----------------------------------------------------------------------------------

    @abstractmethod
    def now_us(self) -> int:
        """The wall clock."""

    @abstractmethod
    def remember(self, memory: Remembered) -> None:
        """Write down what the next agent must know."""

    @abstractmethod
    def core_failed(self, given: Input) -> None:
        """Called while the core's exception is handled."""

    @abstractmethod
    def tell_worker(self, worker: WorkerId, message: ToWorker) -> None:
        """Send it, where the worker is connected."""

    @abstractmethod
    def tell_fork_server(self, message: ToForkServer) -> None:
        """Send it, where there is a fork server."""

    @abstractmethod
    def copy(self, order: CopyState) -> None:
        """Copy a state to a peer."""

    @abstractmethod
    def inject_into_node(self, order: InjectIntoNode) -> None:
        """Let an ordered fault happen, and feed NodeFaultInjected."""

    @abstractmethod
    def check(self, order: RunCheck) -> None:
        """Check the node's health, and feed Checked."""

    @abstractmethod
    def disconnect(self, worker: WorkerId, why: str) -> None:
        """Close a worker's connection."""

    @abstractmethod
    def finish(self) -> None:
        """The node has left."""

    @abstractmethod
    def outlived(self, boot: int) -> None:
        """A command has come for a later agent of this node's name. That one is to take it."""

    @abstractmethod
    def held_states(self) -> Iterable[Held]:
        """What the node's memory holds when a fork server greets."""

    def log_tail(self, worker: WorkerId) -> str:
        """The end of a worker's log."""
        return ""

    def acting(self, given: Input, actions: Sequence[Action]) -> Sequence[Action]:
        """What the core asks for is about to be done: the actions that shall be."""
        return actions

    def may_act(self, number: int) -> bool:
        """Whether the action of that number, from 0, is still to be done."""
        return not self.closed

    # --- the one way in and the one way out ------------------------------------------------------

    def feed(self, given: Input) -> None:
        """Let the core handle one input, write down what the next agent must know, do what the core asks for."""
        if self.closed:
            return
        before = self.state.memory
        try:
            self.state, actions = core.handle(self.state, given)
        except Exception:
            self.core_failed(given)
            return
        if self.state.memory is not before:
            self.remember(self.state.memory)
        for number, action in enumerate(self.acting(given, actions)):
            if not self.may_act(number):
                return
            self.do(action)

    def do(self, action: Action) -> None:  # noqa: C901  # one case for each kind of action
        """Do what the core asks for."""
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
            case Disconnect(worker=worker, why=why):
                self.disconnect(worker, why)
            case ForgetLog():
                self.outbox.forget()
                self.read_seq = 0
                self.has_joined.clear()
            case Finish():
                self.finish()
            case _ as never:
                assert_never(never)

    def close(self) -> None:
        """No timer fires and no mark is looked at any more."""
        self.watch.close()
        for timer in self._timers.values():
            timer.cancel()

    def _fire(self, fired: TimerFired) -> None:
        self._timers.pop((fired.name, fired.key), None)
        self.feed(fired)

    def _late(self, worker: WorkerId, mark: Mark, still_us: int, stopped: bool, times: int) -> None:
        self.feed(Stalled(worker=worker, mark=mark, still_us=still_us, stopped=stopped, times=times))

    # --- what is heard ---------------------------------------------------------------------------

    def worker_connected(self, hello: Hello) -> None:
        """A worker has said its id."""
        self.feed(WorkerConnected(hello=hello))
        if hello.worker in self.state.memory.workers and not self.closed:
            self.watch.follow(hello.worker, hello.pid)

    def fork_server_said(self, message: FromForkServer) -> None:
        """A message of the fork server; an inventory is followed by what it holds."""
        log_tail, mark = "", None
        if isinstance(message, Inventory):
            self.has_inventory.set()
        elif isinstance(message, Exited):
            log_tail, mark = self.log_tail(message.worker), self.watch.drop(message.worker)
        self.feed(ForkServerSaid(message=message, log_tail=log_tail, mark=mark))
        if isinstance(message, Inventory) and not self.closed:
            for entry in message.workers:  # one that stands still says no hello to a new agent
                self.watch.follow(entry.worker, entry.pid)
            for held in list(self.held_states()):
                self.feed(StateHeld(held=held))

    def tasks_here(self, seen: LogSeen | None = None) -> frozenset[str]:
        """The tasks that have a worker here, or will. `seen`: the log that answers now; what another log started is
        nothing to it, and ends as soon as the core has seen it."""
        memory = self.state.memory
        if seen is not None and difference(memory, seen):
            return frozenset()
        here = frozenset(worker.task for worker in memory.workers.values() if not worker.foreign)
        return here | {waiting.command.spec.name for waiting in memory.waiting}

    async def take_entries(self, feed: CommandFeed) -> None:
        """Obey and follow what the feed gives, without end.

        A task is followed before the command to start its first worker here is acknowledged, so that nothing that the
        log tells of it afterwards is missed; whatever is followed already is said again then, since another agent of
        this name may have changed it. What has no worker here any more is given up with the next entry.
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
                if self.closed or self.is_outlived:
                    return  # what it has not finished comes again, to the next agent
                self.read_seq = recorded.seq

    def take(self, recorded: Recorded) -> None:
        """An entry of the node's feed."""
        envelope, event, warrant = recorded.envelope, recorded.envelope.event, recorded.warrant
        if isinstance(event, Command):
            if event.agent_boot > self.state.config.agent_boot:
                self.is_outlived = True
                self.outlived(event.agent_boot)
                return
            age_s = max(0.0, (self.now_us() - recorded.recorded_at_us) / 1e6)
            cause = envelope.event_id
            self.feed(Commanded(command=event, term=envelope.term, cause=cause, age_s=age_s, warrant=warrant))
        elif isinstance(event, TOLD):
            self.feed(Told(event=event, term=envelope.term, warrant=warrant))

    # --- reports now and then --------------------------------------------------------------------

    def beat(self, **load: Any) -> Envelope:
        """The next heartbeat. `load`: further fields of Heartbeat."""
        self._beat += 1
        config = self.state.config
        workers = len(self.state.memory.workers)
        beat = Heartbeat(
            node=config.node,
            agent_boot=config.agent_boot,
            beat=self._beat,
            workers=workers,
            read_seq=self.read_seq,
            **load,
        )
        return Envelope(
            producer=config.node,
            boot=config.agent_boot,
            number=self._beat,
            observed_at_us=self.now_us(),
            event=lowered(beat, self.outbox.schema) or beat,
        )
