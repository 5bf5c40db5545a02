"""The worker's connection to its agent: one thread, one Unix socket, one condition that the main thread waits on.

Rules
-----
* Training never waits for the agent: `send` queues, the thread delivers. A lost connection is made again by the
  worker's line (protocol/worker_line.py) with a growing pause; then the worker says Hello with its generation, and
  repeats the newest of each kind in `_REPEATED` that was sent before (it may have died with the old agent), or
  WorkerReady if it has no membership. What was queued follows in order.
* Whatever the main thread waits for (a collective, a group that forms, a membership), it waits for here, in
  `wait`: the agent's messages and finished collectives both notify the one condition, so every wait can be
  interrupted by an urgent membership or a Quit.
* Quit: the main thread is given `QUIT_GRACE_S` to leave; it may be stuck in a collective of its own replica, so
  afterwards the thread ends the process, with exit code 0.
* Self-fencing: with no agent for `lease_s` the thread ends the process (exit code EXIT_NO_AGENT). Somebody else may
  have been given this worker's place.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from unicrond.agents.protocol.framing import BadFrame, Unframer, frame
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
    Stacks,
    TellFlight,
    TellStacks,
    ToWorker,
)
from unicrond.agents.protocol.peers import message_for
from unicrond.agents.protocol.worker_line import Line
from unicrond.agents.trainer.lifecycle.results import QuitRequested
from unicrond.agents.trainer.process.faults import mask_of, redact
from unicrond.agents.trainer.process.flight import read_flight, read_stacks
from unicrond.events.vocabulary import (
    CheckpointSaved,
    ErrorReported,
    Fault,
    StopRequested,
    TaskCompleted,
    WorkerBusy,
    WorkerJoinedGroup,
    WorkerReady,
)
from unicrond.events.wire.schemas import SCHEMA

QUIT_GRACE_S = 2.0
_PAUSE_MIN_S = 0.02
_PAUSE_MAX_S = 0.5
_QUEUE_MAX_MESSAGES = 65536
_REPEATED = (WorkerJoinedGroup, IterationCommitted, CheckpointSaved, TaskCompleted, WorkerBusy, StopRequested)


class AgentChannel:
    """Sends messages to the agent and receives its orders; see the module's rules. `start` it in the process that uses
    it (threads do not survive a fork)."""

    def __init__(self, launch: Launch, lease_s: float) -> None:
        #: Ordered faults, for injection.py to take.
        self.ordered_faults: deque[Fault] = deque()
        self._launch = launch
        self._mask = mask_of(launch.spec)
        self._line = Line(launch.line_fd)
        self._lease_s = lease_s
        self._condition = threading.Condition()
        self._memberships: dict[int, GroupMembership] = {}
        self._received: dict[int, float] = {}
        self._generation = 0
        self._ready = False
        self._quit_reason: str | None = None
        self._quit_at = 0.0
        self._queue: deque[FromWorker] = deque()
        self._remembered: dict[type, FromWorker] = {}
        self._agent_schema = SCHEMA
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    # --- the main thread's side ------------------------------------------------------------------

    @property
    def reporter(self) -> Reporter:
        """Return the fields by which an event names this worker."""
        return self._launch.reporter

    def start(self) -> None:
        """Start the thread that connects to the agent, and connects again whenever the connection ends."""
        threading.Thread(target=self._run, name="agent-channel", daemon=True).start()

    def send(self, message: FromWorker) -> None:
        """Queue `message`; never blocks. The oldest goes where the agent has been away for too many.

        Secrets of the task do not show in what is told of a trouble.
        """
        if isinstance(message, ErrorReported):
            message = redact(message, self._mask)
        with self._condition:
            if isinstance(message, WorkerReady):
                self._ready = True
            elif isinstance(message, WorkerJoinedGroup):
                self._generation = message.generation
            self._queue.append(message)
            if len(self._queue) > _QUEUE_MAX_MESSAGES:
                self._queue.popleft()
        self._wake_thread()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is in the agent's socket; False if that took longer than `timeout_s`."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._queue, timeout_s)

    def newest(self, above: int, urgent_only: bool = False) -> GroupMembership | None:
        """Return the newest membership of a generation greater than `above`, None for none."""
        with self._condition:
            return self._newest(above, urgent_only)

    def membership(self, generation: int) -> GroupMembership | None:
        """Return the membership of that generation, None where it has not come."""
        with self._condition:
            return self._memberships.get(generation)

    def received_at(self, generation: int) -> float:
        """Return when the generation's membership first came (monotonic seconds)."""
        return self._received[generation]

    def drop_below(self, below: int) -> None:
        """Drop the memberships of lower generations than `below`."""
        with self._condition:
            for generation in [older for older in self._memberships if older < below]:
                del self._memberships[generation], self._received[generation]

    def quit_requested(self) -> bool:
        """Return whether the agent wants this worker to end."""
        return self._quit_reason is not None

    def wait(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `done()`, which is asked again at every message and every `wake`. False on timeout.

        Raises QuitRequested as soon as the agent asks the worker to end.
        """
        with self._condition:
            satisfied = self._condition.wait_for(lambda: self._quit_reason is not None or predicate(), timeout_s)
        if self._quit_reason is not None:
            raise QuitRequested(self._quit_reason)
        return satisfied

    def wake(self) -> None:
        """Let waiters look again; called by whatever thread finishes what they wait for."""
        with self._condition:
            self._condition.notify_all()

    # --- the thread's side -----------------------------------------------------------------------

    def _newest(self, above: int, urgent_only: bool) -> GroupMembership | None:
        candidates = [
            generation
            for generation, membership in self._memberships.items()
            if generation > above and (membership.urgent or not urgent_only)
        ]
        return self._memberships[max(candidates)] if candidates else None

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):  # it is full, and wakes anyway; or the channel has been closed meanwhile
            self._wake_write.send(b"\0")

    def _run(self) -> None:
        pause_s, connected_at = _PAUSE_MIN_S, time.monotonic()
        while True:
            connection = self._connect()
            if connection is not None:
                self._serve(connection)
                pause_s, connected_at = _PAUSE_MIN_S, time.monotonic()
            self._exit_if_overdue()
            if time.monotonic() - connected_at > self._lease_s:
                self._exit(f"no agent for {self._lease_s} s: ending", EXIT_NO_AGENT)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _PAUSE_MAX_S)

    def _connect(self) -> socket.socket | None:
        connected = self._line.connect()
        if connected is None:
            return None
        connection, self._agent_schema = connected
        connection.setblocking(False)
        return connection

    def _greeting(self) -> list[FromWorker]:
        hello = Hello(
            worker=self._launch.worker,
            task=self._launch.task,
            pid=os.getpid(),
            generation=self._generation,
            ready=self._ready,
            has_flight=True,
            has_stacks=True,
            repeats_numbers=True,
        )
        repeated = [self._remembered[kind] for kind in _REPEATED if kind in self._remembered]
        repeated = [
            lowered for message in repeated if (lowered := message_for(self._agent_schema, message)) is not None
        ]
        unanswered = self._ready and self._generation == 0 and not any(isinstance(m, WorkerReady) for m in self._queue)
        return [hello, *([WorkerReady(**self.reporter)] if unanswered else []), *repeated]

    def _serve(self, connection: socket.socket) -> None:
        """Carry messages both ways until the connection ends."""
        incoming: Unframer[ToWorker] = Unframer(ToWorker)
        with self._condition:
            greeting = b"".join(frame(message) for message in self._greeting())
        outgoing = memoryview(greeting)
        with connection, selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            in_flight: FromWorker | None = None
            while True:
                self._exit_if_overdue()
                timeout_s = None if self._quit_reason is None else QUIT_GRACE_S / 4
                for key, events in selector.select(timeout_s):
                    if key.fileobj is self._wake_read:
                        self._drain_wakes()
                        continue
                    try:
                        if events & selectors.EVENT_READ and not self._receive(connection, incoming):
                            return
                        if events & selectors.EVENT_WRITE and outgoing:
                            outgoing = outgoing[connection.send(outgoing) :]
                    except BlockingIOError:
                        pass
                    except BadFrame as error:
                        print(f"agent channel: bad frame from the agent, connecting again: {error}", file=sys.stderr)
                        return
                    except OSError:
                        return
                if not outgoing:
                    in_flight, outgoing = self._next_outgoing(in_flight)
                interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
                selector.modify(connection, interest)

    def _next_outgoing(self, previous: FromWorker | None) -> tuple[FromWorker | None, memoryview]:
        """Take note that `sent` is in the socket, and give the next message; it stays queued until it is sent."""
        with self._condition:
            if previous is not None:
                if self._queue and self._queue[0] is previous:
                    self._queue.popleft()
                self._remember(previous)
                self._condition.notify_all()
            while self._queue:
                lowered = message_for(self._agent_schema, self._queue[0])
                if lowered is not None:
                    return self._queue[0], memoryview(frame(lowered))
                self._remember(self._queue.popleft())  # a younger agent may come yet
            self._condition.notify_all()
            return None, memoryview(b"")

    def _remember(self, message: FromWorker) -> None:
        if isinstance(message, _REPEATED):
            self._remembered[type(message)] = message

    def _receive(self, connection: socket.socket, incoming: Unframer[ToWorker]) -> bool:
        """Take what has arrived; False at the end of the stream."""
        data = connection.recv(65536)
        for message in incoming.feed(data):
            with self._condition:
                if isinstance(message, GroupMembership):
                    self._memberships.setdefault(message.generation, message)
                    self._received.setdefault(message.generation, time.monotonic())
                elif isinstance(message, InjectIntoWorker):
                    self.ordered_faults.append(message.fault)
                elif isinstance(message, TellFlight):  # a library's lock must not hold up this thread
                    self._tell_flight(message.number)
                elif isinstance(message, TellStacks):  # before the next message moves the main thread on
                    self.send(Stacks(text=read_stacks(), question=message.number))
                elif isinstance(message, Quit) and self._quit_reason is None:
                    self._quit_reason = message.reason
                    self._quit_at = time.monotonic()
                self._condition.notify_all()
        return bool(data)

    def _tell_flight(self, question: int) -> None:
        def tell() -> None:
            """Read it and send it."""
            self.send(replace(read_flight(), question=question))

        threading.Thread(target=tell, name="flight", daemon=True).start()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _exit_if_overdue(self) -> None:
        if self._quit_reason is not None and time.monotonic() - self._quit_at > QUIT_GRACE_S:
            self._exit(f"asked to end ({self._quit_reason}) and the main thread does not react: ending", 0)

    def _exit(self, reason: str, code: int) -> None:
        print(f"{self._launch.worker}: {reason}", file=sys.stderr, flush=True)
        os._exit(code)
