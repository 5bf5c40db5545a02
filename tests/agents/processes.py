"""Processes of tests: started, watched by pidfd (never polled), and shown to be gone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unicrond.agents.protocol.framing import Unframer, frame
from unicrond.agents.protocol.messages import FromForkServer, Inventory, ToForkServer

ROOT = Path(__file__).resolve().parents[2]
LIGHT = (
    "--preload=tests.agents.entries",
    "--worker=tests.agents.entries:run",
    "--store=tests.agents.entries:serve",
)
TIMEOUT_S = 20.0


def environment() -> dict[str, str]:
    """That of the tests, with the checkout importable and one thread per process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def has_ended(pid: int, within_s: float = TIMEOUT_S) -> bool:
    """Whether the process ends within the time (a zombie has ended)."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], within_s)[0])
    finally:
        os.close(pidfd)


def children(pid: int) -> list[int]:
    """The living children of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def command_of(pid: int) -> str:
    """With which words a process was started; a fork has its parent's."""
    return Path(f"/proc/{pid}/cmdline").read_text()


def eventually(condition: Callable[[], object], within_s: float = TIMEOUT_S) -> bool:
    """Whether the condition comes true. For what nothing tells of, such as the birth of another's child."""
    deadline_s = time.monotonic() + within_s
    while not (is_true := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return bool(is_true)


def kill(pid: int) -> None:
    """SIGKILL; fine where it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class ForkServerProcess:
    """`python -m unicrond.agents.fork_server`, ready to be connected to."""

    def __init__(
        self, run_dir: Path, *arguments: str, flags: tuple[str, ...] = LIGHT, prefix: tuple[str, ...] = ()
    ) -> None:
        ready, said = os.pipe()
        command = [
            *prefix,
            sys.executable,
            "-m",
            "unicrond.agents.fork_server",
            "--run-dir",
            str(run_dir),
            *flags,
            *arguments,
        ]
        with (run_dir / "fork_server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--ready-fd", str(said)],
                stdout=log,
                stderr=log,
                pass_fds=(said,),
                start_new_session=True,
                env=environment(),
            )
        os.close(said)
        select.select([ready], [], [], 60)
        self.is_ready = os.read(ready, 16) == b"ready\n"
        os.close(ready)
        self.pid = self.process.pid
        self.run_dir = run_dir

    def log(self) -> str:
        return (self.run_dir / "fork_server.log").read_text()


class AgentSide:
    """An agent's end of the fork server's socket, blocking."""

    def __init__(self, run_dir: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(str(run_dir / "fork.sock"))
        self.incoming: Unframer[FromForkServer] = Unframer(FromForkServer)
        self.queue: list[FromForkServer] = []
        self.received: list[FromForkServer] = []

    def send(self, message: ToForkServer) -> None:
        self.socket.sendall(frame(message))

    def messages(self) -> Iterator[FromForkServer]:
        """What comes, until the connection ends."""
        while True:
            while self.queue:
                message = self.queue.pop(0)
                self.received.append(message)
                yield message
            data = self.socket.recv(65536)
            if not data:
                return
            self.queue += self.incoming.feed(data)

    def next(self, kind: type) -> Any:
        """The next message of a kind; others are passed over."""
        return next(message for message in self.messages() if isinstance(message, kind))

    def inventory(self) -> Inventory:
        inventory = self.next(Inventory)
        assert isinstance(inventory, Inventory)
        return inventory

    def ends(self) -> bool:
        """Whether the fork server closes the connection."""
        try:
            for _ in self.messages():
                pass
        except ConnectionResetError:
            return True
        return True

    def close(self) -> None:
        self.socket.close()
