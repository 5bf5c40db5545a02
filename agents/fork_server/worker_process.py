"""Turns a forked child, a copy of the fork server, into an independent worker.

It runs between fork and the worker's own code, so it does nothing that could block or take a lock, and it
never returns: whatever happens ends in `os._exit`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from unicrond.agents.fork_server.cgroups import enter
from unicrond.agents.fork_server.privileges import StillPrivileged, become, personal
from unicrond.agents.fork_server.task_secrets import NoSecret, read_secrets
from unicrond.agents.host.prctl import die_with_parent
from unicrond.agents.protocol.messages import Identity, Launch

#: Under memory pressure the kernel shall kill a worker, not the agent or the fork server (see proc(5)).
OOM_SCORE_ADJUSTMENT = 500
#: Signals that the fork server handles or ignores, and a worker by default does not. Blocked around the fork.
HANDLED_SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSetup:
    """The files and settings with which a forked child becomes a worker. `output_fd`: its stdout and stderr;
    `inherited_fds`: the other descriptors that it keeps. `user`, `cgroup`: its user and cgroup; None: its parent's.
    `limits`: by number of resource.
    """

    launch: Launch
    slot: int
    gpus: tuple[str, ...]
    output_fd: int
    inherited_fds: tuple[int, ...]
    parent_pid: int
    user: Identity | None = None
    cgroup: Path | None = None
    limits: Mapping[int, int] = field(default_factory=dict)


def detach(parent_pid: int, close_inherited: Callable[[], None]) -> None:
    """Give the child its own session and process group, death with the parent, default signals, and no descriptor of
    the parent's.

    Called with HANDLED_SIGNALS blocked; unblocks them.
    """
    os.setsid()
    die_with_parent(parent_pid)
    signal.set_wakeup_fd(-1)
    close_inherited()
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)


def become_worker(setup: ChildSetup, run: Callable[[Launch], object]) -> NoReturn:
    """Turn this (detached) child into the worker and run it to its end."""
    code = 1
    try:
        keep_only({0, 1, 2, setup.output_fd, *setup.inherited_fds})
        redirect(setup.output_fd, setup.user)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJUSTMENT), "ascii")
        settle(setup)
        run(setup.launch)
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except (NoSecret, NoDirectory, StillPrivileged) as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def keep_only(fds: Collection[int]) -> None:
    """Close every other descriptor, those of libraries too."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) not in fds:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))


class NoDirectory(Exception):
    """The worker cannot enter its working directory."""


def settle(setup: ChildSetup) -> None:
    """Enter the worker's cgroup, become the task's user, set its environment and enter its working directory.

    Raise NoSecret, NoDirectory, StillPrivileged, OSError.
    """
    spec, user = setup.launch.spec, setup.user
    if setup.cgroup is not None:
        enter(setup.cgroup)
    if user is not None:
        become(user, setup.limits, setup.parent_pid)
    if setup.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = setup.gpus[setup.slot]
        # Numbered as NVML does: the accelerator that is watched for the slot is the one it computes on.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if user is not None:
        os.environ.update(personal(user))
    secrets = read_secrets(spec.secrets)
    os.environ.update(spec.env)
    os.environ.update(secrets)
    attributes = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    os.environ["OTEL_RESOURCE_ATTRIBUTES"] = resource_attributes(attributes, setup.launch)
    directories = [spec.cwd] if spec.cwd else [user.home, "/"] if user else []
    for directory in directories:
        try:
            os.chdir(directory)
            return
        except OSError as error:
            last = error
    if directories:
        as_user = f" as user {user.name}" if user else ""
        raise NoDirectory(f"cwd: cannot enter {spec.cwd}{as_user}: {last.strerror}")


def redirect(output_fd: int, user: Identity | None) -> None:
    """Redirect stdout and stderr to the descriptor, line by line, and let stdin be empty."""
    if user is not None:
        with contextlib.suppress(OSError):  # without CAP_CHOWN: then /dev/stdout cannot be opened by name
            os.fchown(output_fd, user.uid, user.gid)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    for fd in (null, output_fd):
        if fd > 2:
            os.close(fd)
    # Line by line, so that the last words of a process that is killed are in its log.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)


def _exit_code(code: object) -> int:
    """Return the exit code as the interpreter does: None is 0, a number is itself, any other object is printed and
    1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def resource_attributes(attributes: str, launch: Launch) -> str:
    """Return the value for OTEL_RESOURCE_ATTRIBUTES, which every OpenTelemetry SDK reads: `attributes`, and the
    worker's, unless they are there; so spans of a worker carry the same names as unicrond's (unicrond/views/spans.py).
    """
    worker_attributes = {"unicron.task": launch.task, "unicron.worker": launch.worker, "unicron.node": launch.node}
    names = {part.partition("=")[0].strip() for part in attributes.split(",")}
    return ",".join(
        [
            *filter(None, [attributes]),
            *(f"{name}={value}" for name, value in worker_attributes.items() if name not in names),
        ]
    )
