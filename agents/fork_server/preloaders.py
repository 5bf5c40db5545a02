"""The fork server's side of preloaders (preloader.py): one for each task with `preload` that has had workers here.

Rules
-----
* A worker of such a task waits until its preloader is ready, and is born of that.
* A preloader that fails takes the births that wait with it: each says why, and the next start tries again. Where one
  that was ready is gone, another takes them over, once: a worker that was not told to begin never does.
* What it says is a user's word: pids are the kernel's, and only of processes that are the fork server's children by
  then. It cannot make the fork server wait.
* It is kept for as long as its task keeps states here, and `MOST` at a time; another environment makes another one.
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

from agents.fork_server.birth import Birth
from agents.fork_server.cgroups import Cgroups, enter
from agents.fork_server.preloader import BORN, ORDER_BYTES_MAX, READY, Order, go
from agents.fork_server.privileges import StillPrivileged, become
from agents.fork_server.task_secrets import NoSecret
from agents.fork_server.worker_process import NoDirectory, keep_only, redirect, settle
from events.vocabulary import Name

MOST = 8
_UCRED = struct.Struct("3i")


@dataclass(slots=True)
class Waiting:
    """A birth under way. `born(pid)` is called when the process is there, and knows nothing before `born` returns;
    `failed(reason)` in its place. `fds`: copies of the birth's descriptors, closed afterwards."""

    birth: Birth
    fds: list[int]
    born: Callable[[int], None]
    failed: Callable[[str], None]
    go_fd: int = -1
    is_second: bool = False


@dataclass(slots=True)
class _Preloader:
    task: Name
    key: bytes
    pid: int
    uid: int
    control: socket.socket
    cgroup: str
    log: Path
    is_ready: bool = False
    #: Not ordered yet; ordered, in this order.
    waiting: deque[Waiting] = field(default_factory=deque)
    ordered: deque[Waiting] = field(default_factory=deque)


class Preloaders:
    """`fork(child)`: gives the pid. `preload`, `worker`: names of a module and of a function, as the fork server has
    them. `taken(pid)`: whether it is a worker's already. `output(birth, log)`: a descriptor for what goes there,
    as a worker's of that birth does."""

    def __init__(
        self,
        fork: Callable[[Callable[[], object]], int],
        selector: selectors.BaseSelector,
        preload: str,
        worker: str,
        taken: Callable[[int], bool],
        cgroups: Cgroups,
        output: Callable[[Birth, Path], int],
    ) -> None:
        self._output = output
        self._taken = taken
        self._cgroups = cgroups
        self._made = 0
        self._fork = fork
        self._selector = selector
        self._preload = preload
        self._worker = worker
        self._pid = os.getpid()
        self._by_task: dict[Name, _Preloader] = {}
        self._by_pid: dict[int, _Preloader] = {}

    def has(self, pid: int) -> bool:
        """Whether `pid` is a preloader's."""
        return pid in self._by_pid

    def bear(self, waiting: Waiting, log: Path) -> None:
        """Have the worker born of its task's preloader, now or when that is ready. `log`: the preloader's. Raises
        OSError."""
        birth = waiting.birth
        task, key = birth.launch.task, _key(birth)
        there = self._by_task.get(task)
        if there is not None and there.key != key:
            self._end(there, "the task has another environment by now")
            there = None
        if there is None:
            there = self._start(birth, key, log)
        there.waiting.append(waiting)
        if there.is_ready:
            self._order(there)

    def forget(self, task: str) -> None:
        """End the task's; all where it is ""."""
        for one in list(self._by_task.values()):
            if task in ("", one.task):
                self._end(one, "the task has ended here")

    def ended(self, pid: int) -> None:
        """Its process has ended and was waited for. What it said before may not have been read yet."""
        one = self._by_pid.pop(pid)
        self._cgroups.ended(one.cgroup)
        while self._hear(one):
            pass
        self._end(one, _complaint(b""))

    def close(self) -> None:
        """In a child, or at the end: every descriptor."""
        for one in self._by_task.values():
            one.control.close()
            for waiting in (*one.waiting, *one.ordered):
                for fd in (*waiting.fds, waiting.go_fd):
                    with contextlib.suppress(OSError):
                        os.close(fd)

    # --- inside ----------------------------------------------------------------------------------

    def _has(self, pid: int) -> bool:
        return pid in self._by_pid or self._taken(pid)

    def _start(self, birth: Birth, key: bytes, log: Path) -> _Preloader:
        for old in list(self._by_task.values())[: max(0, len(self._by_task) - MOST + 1)]:
            self._end(old, "more tasks have modules to import than this node keeps")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * ORDER_BYTES_MAX)
        command = [sys.executable, "-P", "-m", "agents.fork_server.preloader", str(theirs.fileno()), str(self._pid)]
        command += [self._preload, self._worker, *birth.launch.spec.preload]
        self._made += 1
        name = f"{birth.launch.task}.preload{self._made}"
        with theirs, contextlib.ExitStack() as opened:
            opened.callback(ours.close)
            output_fd = self._output(birth, log)
            try:
                cgroup = self._cgroups.make(name)
                process = replace(birth, gpus=(), output_fd=output_fd, given=(theirs.fileno(),), cgroup=cgroup)
                pid = self._fork(lambda: _become_preloader(process, command))
            finally:
                os.close(output_fd)
            opened.pop_all()
        made = _Preloader(birth.launch.task, key, pid, birth.user.uid if birth.user else os.getuid(), ours, name, log)
        self._by_task[made.task] = self._by_pid[pid] = made
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._hear(made))
        return made

    def _order(self, one: _Preloader) -> None:
        while one.waiting:
            waiting = one.waiting[0]
            birth = waiting.birth
            read_fd, waiting.go_fd = os.pipe2(os.O_CLOEXEC)
            body = msgspec.msgpack.encode(Order(birth.launch, birth.slot, birth.gpus))
            try:
                output_fd, *kept = waiting.fds
                socket.send_fds(one.control, [body], [output_fd, read_fd, *kept])
            except OSError as error:
                os.close(waiting.go_fd)
                waiting.go_fd = -1
                if not isinstance(error, BlockingIOError):  # else more at its next word
                    self._end(one, _complaint(b""))
                return
            finally:
                os.close(read_fd)
            one.ordered.append(one.waiting.popleft())

    def _hear(self, one: _Preloader) -> bool:
        """Read one word of it; whether there may be more."""
        try:
            said, ancillary, _, _ = one.control.recvmsg(2048, socket.CMSG_SPACE(_UCRED.size))
        except BlockingIOError:
            return False
        except OSError:
            said, ancillary = b"", []
        pid = next((_UCRED.unpack(data)[0] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS), 0)
        if said == READY and not one.is_ready:
            one.is_ready = True
        elif said == BORN and one.ordered and _is_child(pid, self._pid, one.uid) and not self._has(pid):
            waiting = one.ordered.popleft()
            waiting.born(pid)
            with contextlib.suppress(OSError):
                go(waiting.go_fd)
            _release(waiting)
        else:
            self._end(one, _complaint(said))
            return False
        self._order(one)
        return True

    def _end(self, one: _Preloader, why: str) -> None:
        if self._by_task.get(one.task) is one:
            del self._by_task[one.task]
        if one.control.fileno() >= 0:
            self._selector.unregister(one.control)
            one.control.close()
        if one.pid in self._by_pid:  # not waited for: its pid is its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        births = (*one.ordered, *one.waiting)
        one.waiting.clear()
        one.ordered.clear()
        for birth in births:
            if one.is_ready and not birth.is_second:
                self._again(birth, one.log)
            else:
                birth.failed(f"preload: {why}"[:1024])
                _release(birth)

    def _again(self, birth: Waiting, log: Path) -> None:
        birth.is_second = True
        if birth.go_fd >= 0:
            os.close(birth.go_fd)
            birth.go_fd = -1
        try:
            self.bear(birth, log)
        except OSError as error:
            birth.failed(f"preload: {error.strerror}"[:1024])
            _release(birth)


def _become_preloader(birth: Birth, command: list[str]) -> None:
    """In the child: everything that a worker becomes, and then a fresh interpreter."""
    keep_only({0, 1, 2, birth.output_fd, *birth.given})
    redirect(birth.output_fd, birth.user)
    try:
        if birth.cgroup is not None:
            enter(birth.cgroup)
        if birth.user is not None:
            become(birth.user, birth.limits, birth.parent_pid)
        settle(birth)
        os.set_inheritable(birth.given[0], True)
        os.execv(command[0], command)
    except (NoDirectory, NoSecret, OSError, StillPrivileged) as error:
        print(error, flush=True)
        os.write(birth.given[0], str(error).encode()[:1024])


def _complaint(said: bytes) -> str:
    if not said:
        return "the process that imports its modules has ended"
    if said in (READY, BORN):
        return "the process that imports its modules says what is not so"
    return f"it cannot be imported: {said.decode(errors='replace')}"


def _key(birth: Birth) -> bytes:
    spec = birth.launch.spec
    return msgspec.msgpack.encode([birth.user, spec.cwd, spec.preload, sorted(spec.env.items()), spec.secrets])


def _release(waiting: Waiting) -> None:
    for fd in (*waiting.fds, waiting.go_fd):
        with contextlib.suppress(OSError):
            os.close(fd)
    waiting.fds, waiting.go_fd = [], -1


def _is_child(pid: int, parent: int, uid: int) -> bool:
    """Whether the process is `parent`'s child and `uid`'s: nothing else may be signalled in a worker's name."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    except OSError:
        return False
    told = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return told.get("PPid") == [str(parent)] and told.get("Uid", [""])[0] == str(uid)
