"""A task that attacks its node: what the fork server of test_separation.py runs in its children.

Each attempt is a function of the facts that the test gives; its outcome is a word: an errno's name where the kernel
refused, else what it got. `spec.args`: the facts as JSON. They are printed as JSON.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.agents.entries import serve  # noqa: F401
from unicrond.agents.protocol import marks, memory
from unicrond.agents.protocol.messages import Launch
from unicrond.agents.protocol.worker_line import Line

_libc = ctypes.CDLL(None, use_errno=True)
_PTRACE_ATTACH = 16
_SYS_PIDFD_GETFD = 438
Facts = dict[str, Any]


def run(launch: Launch) -> None:
    """Try all, say what became of each; or do the one thing that `entry` names."""
    facts = json.loads(launch.spec.args[0])
    if launch.spec.entry == "linger":
        linger()
        return
    if launch.spec.entry == "tell":
        print("the token is", os.environ["TOKEN"])
        return
    if launch.spec.entry == "wait":
        while True:
            signal.pause()
    outcomes = {name: outcome(lambda attempt=attempt: attempt(launch, facts)) for name, attempt in ATTEMPTS.items()}
    print(json.dumps(outcomes))


def linger() -> None:
    """Leave a process that has forgotten all that ties it to its worker."""
    child = os.fork()
    if child == 0:
        os.setsid()
        _libc.prctl(1, 0, 0, 0, 0)  # no death with the parent
        if os.fork():
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):
            os.dup2(null, fd)
        while True:
            signal.pause()
    os.waitpid(child, 0)
    time.sleep(0.2)


def outcome(attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except subprocess.CalledProcessError as error:
        return f"exit {error.returncode}"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def read(path: str) -> str:
    with Path(path).open("rb") as file:
        return f"read {len(file.read(64))} bytes"


def connect(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
    return "connected"


def checked(result: int) -> str:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return "did it"


def write_memory(pid: int) -> str:
    with Path(f"/proc/{pid}/mem").open("r+b") as file:
        file.seek(0x1000)
    return "opened"


def take_descriptor(pid: int) -> str:
    pidfd = os.pidfd_open(pid)
    try:
        return checked(_libc.syscall(_SYS_PIDFD_GETFD, pidfd, 0, 0))
    finally:
        os.close(pidfd)


def privileged_program(facts: Facts) -> str:
    """What a setuid program makes of the user: its effective uid."""
    return subprocess.run([facts["setuid_program"], "-u"], capture_output=True, text=True, check=True).stdout.strip()


def raise_limit() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard + 1))
    except ValueError:
        return f"stays {hard}"
    return "raised"


def grow_mark(launch: Launch) -> str:
    os.truncate(launch.mark, 1 << 30)
    return "grown"


def shrink_memory(launch: Launch) -> str:
    fd = os.open(launch.memory, os.O_RDWR)
    try:
        os.ftruncate(fd, 8192)
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    return "shrunk"


def use_descriptors(launch: Launch) -> list[str]:
    """What can be reached by descriptors that were not given."""
    given = {0, 1, 2, launch.line_fd, *(int(path.rpartition("/")[2]) for path in (launch.mark, launch.memory))}
    found = []
    for fd in range(256):
        try:
            os.fstat(fd)
        except OSError:
            continue
        if fd not in given:
            found.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")  # noqa: PTH115
    return found


def reach_agent(launch: Launch) -> str:
    connected = Line(os.dup(launch.line_fd)).connect()
    if connected is None:
        return "no agent"
    with connected[0]:
        return "connected"


def leave_cgroup(facts: Facts) -> str:
    (Path(facts["cgroup"]) / "cgroup.procs").write_text("0")
    return "left"


def secrets_seen() -> list[str]:
    block = Path("/proc/self/environ").read_bytes()
    return [name for name in ("SECRET_OF_ANOTHER",) if name in os.environ or name.encode() in block]


def status(field: str) -> str:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return " ".join(line.split()[1:])
    return ""


ATTEMPTS: dict[str, Callable[[Launch, Facts], Any]] = {
    "read the agent's key": lambda _, facts: read(facts["key"]),
    "list the run directory": lambda _, facts: os.listdir(facts["run_dir"]),  # noqa: PTH208
    "connect to agent.sock": lambda _, facts: connect(f"{facts['run_dir']}/agent.sock"),
    "connect to fork.sock": lambda _, facts: connect(f"{facts['run_dir']}/fork.sock"),
    "read another task's file": lambda _, facts: read(facts["others_file"]),
    "read another task's environment": lambda _, facts: read(f"/proc/{facts['other']}/environ"),
    "read another task's log": lambda _, facts: read(facts["others_log"]),
    "signal another task": lambda _, facts: os.kill(facts["other"], signal.SIGCONT),
    "signal the agent": lambda _, facts: os.kill(facts["agent"], signal.SIGCONT),
    "signal the fork server": lambda _, facts: os.kill(os.getppid(), signal.SIGCONT),
    "read the fork server's environment": lambda _, __: read(f"/proc/{os.getppid()}/environ"),
    "read the fork server's descriptors": lambda _, __: os.listdir(f"/proc/{os.getppid()}/fd"),  # noqa: PTH208
    "write the agent's memory": lambda _, facts: write_memory(facts["agent"]),
    "write the fork server's memory": lambda _, __: write_memory(os.getppid()),
    "trace the agent": lambda _, facts: checked(_libc.ptrace(_PTRACE_ATTACH, facts["agent"], 0, 0)),
    "take a descriptor of the agent": lambda _, facts: take_descriptor(facts["agent"]),
    "take a descriptor of the fork server": lambda _, __: take_descriptor(os.getppid()),
    "become root": lambda _, __: os.setuid(0),
    "become another user": lambda _, facts: os.setuid(facts["other_uid"]),
    "take root's group": lambda _, __: os.setgid(0),
    "take more groups": lambda _, __: os.setgroups([0]),
    "run a setuid program": lambda _, facts: privileged_program(facts),
    "raise a limit": lambda _, __: raise_limit(),
    "make the mark grow": lambda launch, _: grow_mark(launch),
    "make the memory shrink": lambda launch, _: shrink_memory(launch),
    "use another descriptor": lambda launch, _: use_descriptors(launch),
    "leave the cgroup": lambda _, facts: leave_cgroup(facts),
    "find another's secret": lambda _, __: secrets_seen(),
    # What it may, so that the rest is not refused for want of everything.
    "its ids": lambda _, __: [*os.getresuid(), *os.getresgid(), *sorted(os.getgroups())],
    "its capabilities": lambda _, __: [status("CapEff"), status("CapPrm"), status("CapAmb"), status("NoNewPrivs")],
    "its home": lambda _, __: [os.environ["HOME"], os.environ["USER"], str(Path.cwd())],
    "its cgroup": lambda _, __: Path("/proc/self/cgroup").read_text(),
    "write a mark": lambda launch, _: marks.Marker(Path(launch.mark)).begin_iteration(7, 1),
    "open its memory": lambda launch, _: memory.Memory(launch.memory, launch.memory_max_bytes).close(),
    "speak to its agent": lambda launch, _: reach_agent(launch),
    "what was imported": lambda _, __: sorted(name for name in sys.modules if name.startswith("torch")),
}
