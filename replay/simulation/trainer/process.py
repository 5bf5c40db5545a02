"""A model of a worker's process and of its connection to the agent (agents/trainer/process/channel.py).

Rules
-----
* The worker's messages are queued and delivered in order; a lost connection is made again, with Hello first and the
  newest of each kind in `_REPEATABLE` repeated.
* Quit gives the main thread some time; then the process ends all the same, with code 0. Without an agent for the
  lease it ends itself.
* A hung process hears and says nothing, and only SIGKILL ends it; the kernel may show it as `sigstopped`. A stuck one
  hears and answers, but its main thread does not move.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from msgspec.structs import replace

from unicrond.agents.protocol.injection import Point
from unicrond.agents.protocol.messages import (
    EXIT_NO_AGENT,
    FromWorker,
    GroupMembership,
    Hello,
    InjectIntoWorker,
    IterationCommitted,
    Launch,
    Quit,
    Reporter,
    ToWorker,
)
from unicrond.agents.trainer.process.channel import QUIT_GRACE_S
from unicrond.events.vocabulary import (
    CheckpointSaved,
    ErrorKind,
    Fault,
    TaskCompleted,
    WorkerJoinedGroup,
    WorkerObservation,
    WorkerReady,
)
from unicrond.replay.simulation.models.memory import Copy, MemoryHost
from unicrond.replay.simulation.models.network import Pipe
from unicrond.replay.simulation.models.virtual_time import HostClock
from unicrond.replay.simulation.trainer.progress import ReplicaProgress

#: A point of the lifecycle, or the moment at which a new group's members report that they have joined.
Moment: TypeAlias = Point | Literal["regrouped"]
_REPEATABLE = (WorkerJoinedGroup, IterationCommitted, CheckpointSaved, TaskCompleted)


class ProcessHost(MemoryHost, Protocol):
    """A node, as the processes on it need it."""

    loop: asyncio.AbstractEventLoop
    rng: random.Random
    clock: HostClock
    on: bool
    lease_s: float

    def connect_worker(self, process: Process) -> Pipe[FromWorker] | None:
        """Open a worker's connection to the agent; None while none listens."""
        ...

    def worker_built(self, process: Process) -> None:
        """Let a process train that has built its model."""
        ...

    def membership_received(self, task: str, worker: str, membership: GroupMembership) -> None:
        """Note a membership that a worker receives for the first time."""
        ...

    def keep_copy(self, worker: str, task: str, shard: int, copy: Copy) -> bool:
        """Store a state of a living worker in the node's memory; return False where the fork server has none such."""
        ...

    def process_ended(self, process: Process) -> None:
        """Handle that a process has ended, and its connection with it."""
        ...


class ProcessReplica(Protocol):
    """A replica, as its processes meet it, and faults that strike it by one of them."""

    progress: ReplicaProgress
    slow_s: float
    die_at: Moment | Literal[""]

    @property
    def shards(self) -> Sequence[Process]:
        """Return its processes, in shard order."""
        ...

    def wake(self) -> None:
        """Wake the main thread."""
        ...

    def shard_ended(self, shard: Process) -> None:
        """Handle that one of its processes has ended."""
        ...

    def raise_in(self, kind: ErrorKind) -> None:
        """Let the next micro-batch fail with an error of this kind."""
        ...

    def report(self, kind: ErrorKind) -> None:
        """Report an error that does not end the replica."""
        ...

    def reset(self, shards: Sequence[int]) -> None:
        """Reset the connections of these of its shards."""
        ...


class Process:
    """One incarnation of a worker. `ended`: its wait status, None while it lives."""

    def __init__(self, host: ProcessHost, launch: Launch, pid: int, slot: int) -> None:
        self.host = host
        self.launch = launch
        self.worker = launch.worker
        self.pid = pid
        self.slot = slot
        self.ended: int | None = None
        self.hung = self.sigstopped = self.stuck = False
        #: It will never resume by itself.
        self.for_ever = False
        #: Ordered faults that are not yet injected.
        self.ordered: list[Fault] = []
        self.replica: ProcessReplica | None = None
        self.memberships: dict[int, GroupMembership] = {}
        self.quit_requested = False
        self._generation = 0
        self._ready = False
        self._queue: deque[FromWorker] = deque()
        self._repeatable: dict[type, FromWorker] = {}
        self._to_agent: Pipe[FromWorker] | None = None
        self._alone_since_s = host.loop.time()
        host.loop.call_later(host.rng.uniform(0.05, 0.8), self._built)
        self._look_for_agent()

    @property
    def alive(self) -> bool:
        """Check that the process exists."""
        return self.ended is None

    @property
    def reporter(self) -> Reporter:
        """Return the fields by which an event names this worker."""
        return self.launch.reporter

    @property
    def has_built(self) -> bool:
        """Check that it has been ready to train."""
        return self._ready

    @property
    def slow_s(self) -> float:
        """Return by how much a fault slows every micro-batch of its replica."""
        return 0.0 if self.replica is None else self.replica.slow_s

    # --- the main thread's side ------------------------------------------------------------------

    def send(self, message: FromWorker) -> None:
        """Queue a message to the agent; events are about this worker, whichever shard of its replica speaks."""
        if isinstance(message, WorkerObservation):
            message = replace(message, **self.reporter)
        if isinstance(message, WorkerReady):
            self._ready = True
        elif isinstance(message, WorkerJoinedGroup):
            self._generation = message.generation
        self._queue.append(message)
        self._flush()

    def newest(self, above: int, urgent_only: bool = False) -> int:
        """Return the newest generation above `above` that this worker received; 0 if there is none."""
        return max((g for g, m in self.memberships.items() if g > above and (m.urgent or not urgent_only)), default=0)

    def end(self, status: int) -> None:
        """End the process with this wait status."""
        if self.ended is not None:
            return
        self.ended = status
        self.disconnect()
        if self.replica is not None:
            self.replica.shard_ended(self)
        self.host.process_ended(self)

    def signal(self, number: int) -> None:
        """Handle a signal of the fork server."""
        if number == signal.SIGKILL or not self.hung:
            self.end(number)

    def stand_still(self) -> None:
        """Stop the main thread for ever."""
        self.stuck = self.for_ever = True

    def resume(self) -> None:
        """Resume after a hang, unless that is for ever."""
        if self.alive and (self.hung or self.stuck) and not self.for_ever:
            if self.hung:
                self._look_for_agent()
            self.hung = self.sigstopped = self.stuck = False
            if self.replica is not None:
                self.replica.wake()

    def _built(self) -> None:
        if self.alive:
            if self.hung:
                self.host.loop.call_later(0.5, self._built)
            else:
                self.host.worker_built(self)

    # --- the connection to the agent -------------------------------------------------------------

    def disconnect(self) -> None:
        """Close the connection; the process looks for the next agent."""
        if self._to_agent is not None:
            self._to_agent.close()
            self._to_agent = None
            self._alone_since_s = self.host.loop.time()
            self._look_for_agent()

    def _look_for_agent(self) -> None:
        self.host.loop.call_later(self.host.rng.uniform(0.02, 0.5), self._connect)

    def _connect(self) -> None:
        if not self.alive or self.hung or self._to_agent is not None:
            return
        pipe = self.host.connect_worker(self)
        if pipe is None:
            if self.host.loop.time() - self._alone_since_s > self.host.lease_s:
                self.end(EXIT_NO_AGENT << 8)
            else:
                self._look_for_agent()
            return
        self._to_agent = pipe
        task, generation = self.launch.task, self._generation
        pipe.send(Hello(worker=self.worker, task=task, pid=self.pid, generation=generation, ready=self._ready))
        if self._ready and not generation and not any(isinstance(message, WorkerReady) for message in self._queue):
            pipe.send(WorkerReady(**self.reporter))
        for kind in _REPEATABLE:
            if kind in self._repeatable:
                pipe.send(self._repeatable[kind])
        self._flush()

    def _flush(self) -> None:
        while self._queue and self._to_agent is not None and not self.hung:
            message = self._queue.popleft()
            if isinstance(message, _REPEATABLE):
                self._repeatable[type(message)] = message
            self._to_agent.send(message)

    def receive(self, message: ToWorker) -> None:
        """Handle a message of the agent."""
        if not self.alive or self.hung:
            return
        if isinstance(message, Quit):
            if not self.quit_requested:
                self.quit_requested = True
                self.host.loop.call_later(QUIT_GRACE_S, self._quit_in_the_end)
        elif isinstance(message, InjectIntoWorker):
            self.ordered.append(message.fault)
        elif isinstance(message, GroupMembership) and message.generation not in self.memberships:
            self.host.membership_received(self.launch.task, self.worker, message)
            self.memberships[message.generation] = message
        if self.replica is not None:
            self.replica.wake()
        elif self.quit_requested:
            self.end(0)

    def _quit_in_the_end(self) -> None:
        if self.alive and not self.hung:
            self.end(0)
