"""Starts a preloader (preloader.py) for each task with `preload` that has had workers here, and has it fork them.

Rules
-----
* A worker of such a task waits until its preloader is ready, and is forked by it.
* When a preloader fails, the forks that wait for it fail: each reports why, and the next start tries again. Where one
  that was ready has ended, another takes them over, once: a worker without the order to begin never begins.
* Its messages are a user's and not trusted: pids come from the kernel, and only of processes that are the fork server's
  children by then. It cannot make the fork server wait.
* It lives for as long as its task has states here, and `MOST` at a time; another environment makes another one.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from unicrond.agents.fork_server.cgroups import Cgroups
from unicrond.agents.fork_server.preloader import FORKED, ORDER_BYTES_MAX, READY, ForkOrder, go
from unicrond.agents.fork_server.privileges import StillPrivileged
from unicrond.agents.fork_server.task_secrets import NoSecret
from unicrond.agents.fork_server.worker_process import ChildSetup, NoDirectory, keep_only, redirect, settle
from unicrond.events.vocabulary import Name

MOST = 8
_UCRED = struct.Struct("3i")


@dataclass(slots=True)
class PendingFork:
    """A fork that a preloader is to make. `born(pid)` is called when the process exists, which does nothing before
    `born` returns; `failed(reason)` where there will be none. `fds`: copies of the setup's descriptors, closed
    afterwards."""

    setup: ChildSetup
    fds: list[int]
    born: Callable[[int], None]
    failed: Callable[[str], None]
    go_fd: int = -1
    is_second: bool = False


@dataclass(slots=True)
class _Preloader:
    """The preloader of one task. `key`: the part of a worker's setup that it was started with. `is_ready`: its modules
    are imported."""

    task: Name
    key: bytes
    pid: int
    uid: int
    control: socket.socket
    cgroup: str
    log: Path
    is_ready: bool = False
    #: Forks that are not ordered yet; those that are, in this order.
    waiting: deque[PendingFork] = field(default_factory=deque)
    ordered: deque[PendingFork] = field(default_factory=deque)


class Preloaders:
    """The preloaders of the node's tasks. `fork(child)` returns the pid. `preload`, `worker`: names of a module and of
    a function, as the fork server has them. `is_worker(pid)`: whether it is a worker's already. `output(setup, log)`
    returns a descriptor whose output goes to that log, masked as the worker's output."""

    def __init__(
        self,
        fork: Callable[[Callable[[], object]], int],
        selector: selectors.BaseSelector,
        preload: str,
        worker: str,
        is_worker: Callable[[int], bool],
        cgroups: Cgroups,
        output: Callable[[ChildSetup, Path], int],
    ) -> None:
        self._output = output
        self._is_worker = is_worker
        self._cgroups = cgroups
        self._count = 0
        self._fork = fork
        self._selector = selector
        self._preload = preload
        self._worker = worker
        self._pid = os.getpid()
        self._by_task: dict[Name, _Preloader] = {}
        self._by_pid: dict[int, _Preloader] = {}

    def has(self, pid: int) -> bool:
        """Return whether `pid` is a preloader's."""
        return pid in self._by_pid

    def fork_worker(self, waiting: PendingFork, log: Path) -> None:
        """Have the task's preloader fork the worker, now or when it is ready. `log`: the preloader's. Raise OSError."""
        setup = waiting.setup
        task, key = setup.launch.task, _key(setup)
        preloader = self._by_task.get(task)
        if preloader is not None and preloader.key != key:
            self._end(preloader, "the task has another environment by now")
            preloader = None
        if preloader is None:
            preloader = self._start(setup, key, log)
        preloader.waiting.append(waiting)
        if preloader.is_ready:
            self._order(preloader)

    def forget(self, task: str) -> None:
        """End the task's preloader; all where `task` is ""."""
        for preloader in list(self._by_task.values()):
            if task in ("", preloader.task):
                self._end(preloader, "the task has ended here")

    def ended(self, pid: int) -> None:
        """Handle the end of a preloader's process that has been waited for. Its last messages may not have been read
        yet."""
        preloader = self._by_pid.pop(pid)
        self._cgroups.ended(preloader.cgroup)
        while self._receive(preloader):
            pass
        self._end(preloader, _complaint(b""))

    def close(self) -> None:
        """Close every descriptor, in a child or at the end."""
        for preloader in self._by_task.values():
            preloader.control.close()
            for waiting in (*preloader.waiting, *preloader.ordered):
                for fd in (*waiting.fds, waiting.go_fd):
                    with contextlib.suppress(OSError):
                        os.close(fd)

    # --- inside ----------------------------------------------------------------------------------

    def _has(self, pid: int) -> bool:
        return pid in self._by_pid or self._is_worker(pid)

    def _start(self, setup: ChildSetup, key: bytes, log: Path) -> _Preloader:
        for old in list(self._by_task.values())[: max(0, len(self._by_task) - MOST + 1)]:
            self._end(old, "more tasks have modules to import than this node keeps")
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent_end.setblocking(False)
        parent_end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for end in (parent_end, child_end):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * ORDER_BYTES_MAX)
        command = [
            sys.executable,
            "-P",
            "-m",
            "unicrond.agents.fork_server.preloader",
            str(child_end.fileno()),
            str(self._pid),
        ]
        command += [self._preload, self._worker, *setup.launch.spec.preload]
        self._count += 1
        name = f"{setup.launch.task}.preload{self._count}"
        with child_end, contextlib.ExitStack() as opened:
            opened.callback(parent_end.close)
            output_fd = self._output(setup, log)
            try:
                cgroup = self._cgroups.make(name)
                process = replace(
                    setup, gpus=(), output_fd=output_fd, inherited_fds=(child_end.fileno(),), cgroup=cgroup
                )
                pid = self._fork(lambda: _become_preloader(process, command))
            finally:
                os.close(output_fd)
            opened.pop_all()
        preloader = _Preloader(
            setup.launch.task, key, pid, setup.user.uid if setup.user else os.getuid(), parent_end, name, log
        )
        self._by_task[preloader.task] = self._by_pid[pid] = preloader
        self._selector.register(parent_end, selectors.EVENT_READ, lambda _: self._receive(preloader))
        return preloader

    def _order(self, preloader: _Preloader) -> None:
        while preloader.waiting:
            waiting = preloader.waiting[0]
            setup = waiting.setup
            read_fd, waiting.go_fd = os.pipe2(os.O_CLOEXEC)
            body = msgspec.msgpack.encode(ForkOrder(setup.launch, setup.slot, setup.gpus))
            try:
                output_fd, *other_fds = waiting.fds
                socket.send_fds(preloader.control, [body], [output_fd, read_fd, *other_fds])
            except OSError as error:
                os.close(waiting.go_fd)
                waiting.go_fd = -1
                if not isinstance(error, BlockingIOError):  # else more at its next message
                    self._end(preloader, _complaint(b""))
                return
            finally:
                os.close(read_fd)
            preloader.ordered.append(preloader.waiting.popleft())

    def _receive(self, preloader: _Preloader) -> bool:
        """Read one message of the preloader; return whether there may be more."""
        try:
            message, ancillary, _, _ = preloader.control.recvmsg(2048, socket.CMSG_SPACE(_UCRED.size))
        except BlockingIOError:
            return False
        except OSError:
            message, ancillary = b"", []
        pid = next((_UCRED.unpack(data)[0] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS), 0)
        if message == READY and not preloader.is_ready:
            preloader.is_ready = True
        elif (
            message == FORKED and preloader.ordered and _is_child(pid, self._pid, preloader.uid) and not self._has(pid)
        ):
            waiting = preloader.ordered.popleft()
            waiting.born(pid)
            with contextlib.suppress(OSError):
                go(waiting.go_fd)
            _release(waiting)
        else:
            self._end(preloader, _complaint(message))
            return False
        self._order(preloader)
        return True

    def _end(self, preloader: _Preloader, reason: str) -> None:
        if self._by_task.get(preloader.task) is preloader:
            del self._by_task[preloader.task]
        if preloader.control.fileno() >= 0:
            self._selector.unregister(preloader.control)
            preloader.control.close()
        if preloader.pid in self._by_pid:  # not waited for: the pid is still its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(preloader.pid, signal.SIGKILL)
        forks = (*preloader.ordered, *preloader.waiting)
        preloader.waiting.clear()
        preloader.ordered.clear()
        for waiting in forks:
            if preloader.is_ready and not waiting.is_second:
                self._retry(waiting, preloader.log)
            else:
                waiting.failed(f"preload: {reason}"[:1024])
                _release(waiting)

    def _retry(self, waiting: PendingFork, log: Path) -> None:
        waiting.is_second = True
        if waiting.go_fd >= 0:
            os.close(waiting.go_fd)
            waiting.go_fd = -1
        try:
            self.fork_worker(waiting, log)
        except OSError as error:
            waiting.failed(f"preload: {error.strerror}"[:1024])
            _release(waiting)


def _become_preloader(setup: ChildSetup, command: list[str]) -> None:
    """Become the preloader, in the child: apply a worker's setup, then start a fresh interpreter."""
    keep_only({0, 1, 2, setup.output_fd, *setup.inherited_fds})
    redirect(setup.output_fd, setup.user)
    try:
        settle(setup)
        os.set_inheritable(setup.inherited_fds[0], True)
        os.execv(command[0], command)
    except (NoDirectory, NoSecret, OSError, StillPrivileged) as error:
        print(error, flush=True)
        os.write(setup.inherited_fds[0], str(error).encode()[:1024])


def _complaint(message: bytes) -> str:
    if not message:
        return "the process that imports its modules has ended"
    if message in (READY, FORKED):
        return "the process that imports its modules says what is not so"
    return f"it cannot be imported: {message.decode(errors='replace')}"


def _key(setup: ChildSetup) -> bytes:
    spec = setup.launch.spec
    return msgspec.msgpack.encode([setup.user, spec.cwd, spec.preload, sorted(spec.env.items()), spec.secrets])


def _release(waiting: PendingFork) -> None:
    for fd in (*waiting.fds, waiting.go_fd):
        with contextlib.suppress(OSError):
            os.close(fd)
    waiting.fds, waiting.go_fd = [], -1


def _is_child(pid: int, parent: int, uid: int) -> bool:
    """Return whether the process is `parent`'s child and `uid`'s: no other process may be signalled in a worker's
    name."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    except OSError:
        return False
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return fields.get("PPid") == [str(parent)] and fields.get("Uid", [""])[0] == str(uid)
