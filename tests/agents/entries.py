"""What the fork server of the tests runs in its children: light, and able to misbehave. No torch.

`spec.entry` names the behaviour, `spec.args` its arguments. `talk` speaks the worker's side of the protocol.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from unicrond.agents.host.prctl import capabilities
from unicrond.agents.protocol.framing import Unframer, frame
from unicrond.agents.protocol.messages import (
    Flight,
    FromWorker,
    GroupMembership,
    Hello,
    IterationCommitted,
    Launch,
    Quit,
    Sum,
    TellFlight,
    ToWorker,
)
from unicrond.agents.protocol.worker_line import Line
from unicrond.events.vocabulary import (
    CheckpointSaved,
    CorruptionSuspected,
    DegradationObserved,
    ErrorReported,
    SaveFailed,
    SnapshotStored,
    StateLoaded,
    StopRequested,
    StragglerObserved,
    WorkerBusy,
    WorkerJoinedGroup,
    WorkerPaused,
    WorkerReady,
    WorkerWaiting,
)


def serve(listener: socket.socket) -> NoReturn:
    """The rendezvous store's place: greets connections with a byte, and keeps them."""
    kept = []
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"!")
        kept.append(connection)


def tell_rights(order: Sum) -> None:
    """A sum's place: what it may do."""
    with socket.socket(socket.AF_UNIX) as answer:
        answer.connect(order.answer)
        answer.sendall(json.dumps(sorted(capabilities())).encode())


def run(launch: Launch) -> None:
    """Behave as told."""
    behave = {
        "sleep": sleep,
        "exit": leave,
        "print": fill,
        "describe": describe,
        "orphan": orphan,
        "talk": talk,
        "flood": flood,
        "eat": eat,
        "crash": crash,
    }
    behave[launch.spec.entry](launch)


def sleep(_: Launch) -> NoReturn:
    while True:
        signal.pause()


def leave(launch: Launch) -> NoReturn:
    sys.exit(int(launch.spec.args[0]))


def eat(_: Launch) -> NoReturn:
    """Take memory until there is no more."""
    taken = []
    while True:
        taken.append(b"x" * 1_000_000)


def crash(_: Launch) -> None:
    """End as native code does that is broken, with a core dump in the working directory."""
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.abort()


def fill(launch: Launch) -> None:
    """Print so many numbered lines, then raise."""
    for number in range(int(launch.spec.args[0])):
        print(f"line {number:06d}")
    raise RuntimeError("and then it broke")


def describe(launch: Launch) -> None:
    """Print what a worker is born with."""
    fds = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            fds[path.name] = str(path.readlink())
        except FileNotFoundError:
            continue  # the listing's own
    born = {
        "fds": fds,
        "given": [str(launch.line_fd), launch.mark.rpartition("/")[2], launch.memory.rpartition("/")[2]],
        "pid": os.getpid(),
        "uid": os.getuid(),
        "sid": os.getsid(0),
        "pgid": os.getpgid(0),
        "cwd": str(Path.cwd()),
        "env": {name: os.environ.get(name) for name in ("COLOUR", "OMP_NUM_THREADS")},
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "sigchld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    }
    print(json.dumps(born))


def orphan(_: Launch) -> None:
    """Leave a child behind that holds the pipe, and tell its pid."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    print(child)


def talk(launch: Launch) -> None:
    """Connect, get ready, take memberships, commit an iteration every 10 ms, quit when asked."""
    generation, iteration = 0, 0
    line = Line(launch.line_fd)
    while True:
        connected = line.connect()
        if connected is None:
            time.sleep(0.02)
            continue
        agent = connected[0]
        agent.setblocking(True)
        is_new = generation == 0
        hello = Hello(
            worker=launch.worker,
            task=launch.task,
            pid=os.getpid(),
            generation=generation,
            ready=not is_new,
            has_flight=True,
        )
        incoming: Unframer[ToWorker] = Unframer(ToWorker)
        try:
            agent.sendall(frame(hello) + (frame(WorkerReady(**launch.reporter)) if is_new else b""))
            while True:
                if select.select([agent], [], [], 0.01)[0]:
                    data = agent.recv(65536)
                    if not data:
                        break
                    for message in incoming.feed(data):
                        if isinstance(message, Quit):
                            sys.exit(0)
                        if isinstance(message, TellFlight):
                            agent.sendall(frame(Flight(trouble="a light worker has none")))
                            continue
                        assert isinstance(message, GroupMembership)
                        generation = message.generation
                        regrouped = WorkerJoinedGroup(
                            **launch.reporter,
                            generation=generation,
                            iteration=iteration + 1,
                            micro_batches_assigned=0,
                            duration_us=1,
                            source="own",
                        )
                        agent.sendall(frame(regrouped))
                elif generation:
                    iteration += 1
                    agent.sendall(frame(_commit(generation, iteration)))
        except OSError:
            pass
        finally:
            agent.close()


def flood(launch: Launch) -> None:
    """Say one kind of message, or all in turn ("all"), as fast as the agent's socket takes them, for so many seconds.
    End with code 0, and print how many there were."""
    kind, limit_s = launch.spec.args
    makers = list(JUNK.values()) if kind == "all" else [JUNK[kind]]
    agent, _ = Line(launch.line_fd).connect() or sys.exit("no agent")
    hello = Hello(worker=launch.worker, task=launch.task, pid=os.getpid(), generation=0, ready=False)
    agent.setblocking(True)
    agent.sendall(frame(hello) + frame(WorkerReady(**launch.reporter)))
    agent.setblocking(False)
    number, end_s = 0, time.monotonic() + float(limit_s)
    while (left_s := end_s - time.monotonic()) > 0:
        batch = b"".join(frame(makers[n % len(makers)](launch, n)) for n in range(number + 1, number + 101))
        number += 100
        while batch and select.select([], [agent], [], left_s)[1]:
            batch = batch[agent.send(batch) :]
            left_s = max(0.0, end_s - time.monotonic())
    print("messages:", number)


def _error(launch: Launch, message: str) -> ErrorReported:
    return ErrorReported(
        **launch.reporter, kind="exception", generation=0, iteration=0, phase="unknown", message=message
    )


#: What a program may say again and again, the n-th time.
JUNK: dict[str, Callable[[Launch, int], FromWorker]] = {
    "same error": lambda launch, n: _error(launch, "again"),
    "errors": lambda launch, n: _error(launch, f"number {n}"),
    "waiting": lambda launch, n: WorkerWaiting(**launch.reporter, generation=1),
    "paused": lambda launch, n: WorkerPaused(**launch.reporter, generation=n, iteration=n),
    "busy": lambda launch, n: WorkerBusy(**launch.reporter, section=f"s{n}" if n % 2 else "", limit_us=1),
    "stop": lambda launch, n: StopRequested(**launch.reporter, iteration=n, reason="enough"),
    "saved": lambda launch, n: CheckpointSaved(
        **launch.reporter, iteration=n, path="/nowhere", size_bytes=1, duration_us=1
    ),
    "not saved": lambda launch, n: SaveFailed(**launch.reporter, iteration=n, saver="unicron", reason="full"),
    "joined": lambda launch, n: WorkerJoinedGroup(
        **launch.reporter, generation=n, iteration=n, micro_batches_assigned=0, duration_us=1, source="own"
    ),
    "loaded": lambda launch, n: StateLoaded(
        **launch.reporter, generation=n, source="own", iteration=n, size_bytes=1, duration_us=1
    ),
    "slow": lambda launch, n: DegradationObserved(
        **launch.reporter, generation=1, iteration=n, iteration_us=2, usual_us=1, slowest="", compute_us=0, others_us=0
    ),
    "stragglers": lambda launch, n: StragglerObserved(
        **launch.reporter, generation=1, iteration=n, straggler=f"{launch.task}.{n}", straggler_node="n1", rank=1,
        factor=2.0, compute_us=1, others_us=1, since_iteration=1, since_us=1,
    ),
    "corruption": lambda launch, n: CorruptionSuspected(
        **launch.reporter, generation=1, iteration=n, sign="loss", suspect=f"{launch.task}.{n}", value=1.0, usual=1.0
    ),
    "copies": lambda launch, n: SnapshotStored(
        node=launch.node, task=launch.task, shard=n % 100_000, iteration=n, generation=1, origin=launch.node,
        size_bytes=1, duration_us=1,
    ),
    "commits": lambda launch, n: _commit(1, n, float("nan")),
    "gaps": lambda launch, n: _commit(1, 2 * n),
}  # fmt: skip


def _commit(generation: int, iteration: int, loss: float = 1.0) -> IterationCommitted:
    return IterationCommitted(
        generation=generation,
        iteration=iteration,
        samples=8,
        samples_digest=iteration,
        loss=loss,
        duration_us=10_000,
        micro_batches_by_rank=(8,),
        micro_batches_repeated=0,
    )
