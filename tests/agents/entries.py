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
from pathlib import Path
from typing import NoReturn

from unicrond.agents.host.prctl import capabilities
from unicrond.agents.protocol.framing import Unframer, frame
from unicrond.agents.protocol.messages import (
    Flight,
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
from unicrond.events.vocabulary import WorkerJoinedGroup, WorkerReady


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
                    committed = IterationCommitted(
                        generation=generation,
                        iteration=iteration,
                        samples=8,
                        samples_digest=iteration,
                        loss=1.0,
                        duration_us=10_000,
                        micro_batches_by_rank=(8,),
                        micro_batches_repeated=0,
                    )
                    agent.sendall(frame(committed))
        except OSError:
            pass
        finally:
            agent.close()
