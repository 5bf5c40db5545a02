"""Runs the node's workers as children: forks them, reads their output, kills them, and reports their exits until
acknowledged.

A worker's output is in its log before its exit is reported. A SIGKILL that was not sent from here may have been the
kernel's: the witnesses are asked first. Beside its output a worker inherits three descriptors: its line to the
agent, its mark, and the memory of its shard's state.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from unicrond.agents.fork_server.cgroups import Cgroups, enter
from unicrond.agents.fork_server.masked_output import MaskedLog, masked_log
from unicrond.agents.fork_server.memory_files import MarkPages, Memories
from unicrond.agents.fork_server.oom_witnesses import EXIT_OF_A_KILLED_CHILD, OomWitness
from unicrond.agents.fork_server.preloaders import PendingFork, Preloaders
from unicrond.agents.fork_server.worker_lines import Lines
from unicrond.agents.fork_server.worker_process import ChildSetup, become_worker
from unicrond.agents.protocol import worker_line as line
from unicrond.agents.protocol.gpus import visible_gpus
from unicrond.agents.protocol.messages import (
    ConnectionOwner,
    FromForkServer,
    InventoryWorker,
    Launch,
    OomKill,
    ProcessExited,
    ProcessForked,
    Spawn,
    SpawnFailed,
    Sum,
)
from unicrond.events.vocabulary import Name, WorkerId

_CHUNK_BYTES = 65536
#: How much of a dead worker's pipe is written before its exit is reported (a pipe holds 64 KiB unless enlarged).
_DRAIN_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class _Output:
    """The read end of a worker's pipe and the log that it goes to."""

    fd: int
    log: MaskedLog


@dataclass(slots=True)
class _PendingWorker:
    """A worker that is being started, with the fork server's ends of its line and its output. `opened`: closes all of
    them if the start fails."""

    setup: ChildSetup
    parent_end: socket.socket
    output: _Output
    opened: ExitStack


@dataclass(slots=True)
class _WorkerProcess:
    """A running worker."""

    worker: WorkerId
    task: Name
    pid: int
    slot: int
    output: _Output
    #: A SIGKILL was sent from here.
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Separation:
    """The separation of workers. `users`: each becomes the user that its Spawn names, and loses the fork server's
    privileges. `limits`: by number of resource, the rlimit."""

    users: bool = False
    limits: Mapping[int, int] = field(default_factory=dict)
    cgroups: Cgroups = field(default_factory=lambda: Cgroups(None, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPrograms:
    """The programs of the fork server's children; they run in children, never in the fork server. `run`: a
    worker. `serve_store`: the rendezvous store, on its listening socket. `add_up`: a sum with other nodes, which tests
    the network. `preload`, `worker`: names of the module with the heavy imports and of `run`, for tasks' preloaders."""

    run: Callable[[Launch], object]
    serve_store: Callable[[socket.socket], object]
    add_up: Callable[[Sum], object]
    preload: str
    worker: str


class Workers:
    """The workers of the node. `fork(child)` returns the pid. `say` sends to the agent. `run_dir`: the agent's, with
    its socket and the links to marks."""

    def __init__(
        self,
        programs: ChildPrograms,
        fork: Callable[[Callable[[], object]], int],
        say: Callable[[FromForkServer], None],
        selector: selectors.BaseSelector,
        memories: Memories,
        run_dir: Path,
        separation: Separation,
    ) -> None:
        self._run = programs.run
        self._fork = fork
        self._say = say
        self._selector = selector
        self._memories = memories
        self.separation = separation
        self._lines = Lines(run_dir / "agent.sock", selector)
        self._marks = MarkPages(run_dir / "marks")
        self._gpus = visible_gpus()
        self._oom = OomWitness()
        self._pid = os.getpid()
        self._workers: dict[int, _WorkerProcess] = {}
        self._pids: dict[WorkerId, int] = {}
        self.preloaders = Preloaders(
            fork, selector, programs.preload, programs.worker, self.has, separation.cgroups, self._output
        )
        #: The workers that wait for their preloader.
        self._pending: set[WorkerId] = set()
        self._outputs: dict[int, _Output] = {}
        #: Exits that no agent has acknowledged.
        self.exits: dict[WorkerId, ProcessExited] = {}

    def inventory(self) -> tuple[InventoryWorker, ...]:
        """Return the workers that live."""
        return tuple(
            InventoryWorker(worker=w.worker, task=w.task, pid=w.pid, slot=w.slot) for w in self._workers.values()
        )

    def has(self, pid: int) -> bool:
        """Return whether `pid` is a worker's."""
        return pid in self._workers

    def is_output(self, fd: int) -> bool:
        """Return whether a worker's pipe is read from `fd`."""
        return fd in self._outputs

    def close(self) -> None:
        """Close every descriptor, in a child or at the end."""
        for fd in self._outputs:
            os.close(fd)
        self._oom.close()
        self._lines.close()
        self._marks.close()
        self.preloaders.close()
        for output in self._outputs.values():
            output.log.close()

    def spawn(self, spawn: Spawn) -> None:
        """Fork a worker, or report why not. One that lives or has ended is answered again."""
        launch = spawn.launch
        worker = launch.worker
        if worker in self._pids:
            self._say(ProcessForked(worker=worker, pid=self._pids[worker]))
            return
        if worker in self.exits:
            self._say(self.exits[worker])
            return
        if worker in self._pending:
            return
        try:
            self._require_startable(spawn)
            self._start(spawn)
        except OSError as error:
            self._failed(worker, f"{error.strerror}: {error.filename}" if error.filename else f"{error.strerror}")

    def _failed(self, worker: WorkerId, reason: str) -> None:
        self._pending.discard(worker)
        self._marks.forget(worker)
        self.separation.cgroups.ended(worker)
        self._say(SpawnFailed(worker=worker, reason=reason[:1024]))

    def _start(self, spawn: Spawn) -> None:
        launch = spawn.launch
        worker = launch.worker
        with ExitStack() as opened:
            log = masked_log(Path(spawn.log_path), launch.spec, spawn.user)
            opened.callback(log.close)
            read_fd, write_fd = _pipe(opened)
            parent_end, child_end = line.pair()
            opened.callback(parent_end.close)
            opened.callback(child_end.close)
            mark_fd = _copy(self._marks.make(worker), opened)
            memory_fd = self._memory_fd(launch, opened)
            cgroup = self.separation.cgroups.make(worker)
            launch = msgspec.structs.replace(
                launch,
                memory=f"/proc/self/fd/{memory_fd}" if memory_fd >= 0 else "",
                memory_max_bytes=self._memories.max_bytes if memory_fd >= 0 else 0,
                mark=f"/proc/self/fd/{mark_fd}",
                line_fd=child_end.fileno(),
            )
            setup = ChildSetup(
                launch=launch,
                slot=spawn.slot,
                gpus=self._gpus,
                output_fd=write_fd,
                inherited_fds=(child_end.fileno(), mark_fd, memory_fd),
                parent_pid=self._pid,
                user=spawn.user,
                cgroup=cgroup,
                limits=self.separation.limits,
            )
            pending = _PendingWorker(setup, parent_end, _Output(read_fd, log), opened)
            if launch.spec.preload:
                self._fork_by_preloader(pending)
            else:
                self._register(pending, self._fork(lambda: become_worker(setup, self._run)))
            opened.pop_all()
        child_end.close()
        for fd in (write_fd, mark_fd, memory_fd):
            if fd >= 0:
                os.close(fd)

    def _fork_by_preloader(self, pending: _PendingWorker) -> None:
        """Have the task's preloader fork the worker, later."""
        launch = pending.setup.launch
        fds = [_copy(fd, pending.opened) for fd in (pending.setup.output_fd, *pending.setup.inherited_fds) if fd >= 0]

        def failed(reason: str) -> None:
            pending.parent_end.close()
            pending.output.log.close()
            os.close(pending.output.fd)
            self._failed(launch.worker, reason)

        waiting = PendingFork(pending.setup, fds, lambda pid: self._register(pending, pid), failed)
        name = f"{launch.task}.preload"
        self._pending.add(launch.worker)
        self.preloaders.fork_worker(waiting, pending.output.log.path.with_name(f"{name}.log"))

    def _register(self, pending: _PendingWorker, pid: int) -> None:
        setup, output = pending.setup, pending.output
        launch = setup.launch
        self._pending.discard(launch.worker)
        if launch.spec.preload and setup.cgroup is not None:
            with contextlib.suppress(OSError):  # it has ended already
                enter(setup.cgroup, pid)
        self._lines.serve(pending.parent_end, ConnectionOwner(worker=launch.worker, task=launch.task, pid=pid))
        self._carry(output)
        self._oom.track(pid, stays=setup.cgroup is None)
        self._workers[pid] = _WorkerProcess(launch.worker, launch.task, pid, setup.slot, output)
        self._pids[launch.worker] = pid
        self._say(ProcessForked(worker=launch.worker, pid=pid))

    def _carry(self, output: _Output) -> None:
        self._outputs[output.fd] = output
        self._selector.register(output.fd, selectors.EVENT_READ, lambda _: self._pump(output))

    def _output(self, setup: ChildSetup, log: Path) -> int:
        """Return a descriptor whose output goes to that log, masked as the worker's output. Raise OSError."""
        with ExitStack() as opened:
            masked = masked_log(log, setup.launch.spec, setup.user)
            opened.callback(masked.close)
            read_fd, write_fd = _pipe(opened)
            self._carry(_Output(read_fd, masked))
            opened.pop_all()
        return write_fd

    def _memory_fd(self, launch: Launch, opened: ExitStack) -> int:
        """Return a descriptor of the shard's memory; -1: there is none."""
        if not self._memories.max_bytes or (fd := self._memories.reserve(launch.task, launch.shard)) < 0:
            return -1
        return _copy(fd, opened)

    def _require_startable(self, spawn: Spawn) -> None:
        cwd = spawn.launch.spec.cwd
        if cwd and spawn.user is None and not os.access(cwd, os.X_OK):  # else the user finds out, after the drop
            raise FileNotFoundError(2, "the task's cwd is not a directory that this node can enter", cwd)
        if self.separation.users and spawn.user is None:
            raise OSError(1, "this node's fork server runs each task as a user, and the agent named none")
        if spawn.user is not None and not self.separation.users:
            raise OSError(1, f"this node's fork server cannot run tasks as another user ({spawn.user.name})")
        if self._gpus and spawn.slot >= len(self._gpus):
            raise OSError(
                19, f"slot {spawn.slot} has no GPU: the node has {len(self._gpus)}; start it with fewer slots"
            )

    def sweep(self) -> None:
        """End and remove what an earlier fork server has left."""
        with contextlib.suppress(OSError):  # on a full disk no worker has a mark
            self._marks.sweep()
        self.separation.cgroups.sweep()

    def acknowledged(self, worker: WorkerId) -> None:
        """Forget the worker's exit: the log holds it."""
        self.exits.pop(worker, None)
        self._marks.forget(worker)

    def kill(self, worker: WorkerId, number: int) -> None:
        """Send signal `number` to the worker's process group, while it lives."""
        pid = self._pids.get(worker)
        if pid is None:
            return  # it has ended, and its pid may belong to another process by now
        self._workers[pid].killed |= number == signal.SIGKILL
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # it has not reached its setsid yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pump(self, output: _Output, limit_bytes: int = _CHUNK_BYTES) -> None:
        """Copy the pipe's content into the log, at most `limit_bytes`; close both at the end of the stream."""
        while limit_bytes > 0:
            try:
                data = os.read(output.fd, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(output.fd)
                del self._outputs[output.fd]
                os.close(output.fd)
                output.log.end()
                return
            output.log.write(data)
            limit_bytes -= len(data)

    def ended(self, pid: int, status: int) -> None:
        """Report the worker's exit, of a process that has been waited for, after its pipe is drained."""
        worker = self._workers.pop(pid)
        if worker.output.fd in self._outputs:
            self._pump(worker.output, _DRAIN_BYTES)
        del self._pids[worker.worker]
        oom: OomKill = "no"
        if os.waitstatus_to_exitcode(status) in (-signal.SIGKILL, EXIT_OF_A_KILLED_CHILD) and not worker.killed:
            oom = self._oom.ended(worker.pid)
        else:
            self._oom.forget(worker.pid)
        self.separation.cgroups.ended(worker.worker)
        exited = ProcessExited(worker=worker.worker, pid=worker.pid, status=status, oom=oom)
        self.exits[worker.worker] = exited
        self._say(exited)


def _copy(fd: int, opened: ExitStack) -> int:
    """Copy a descriptor for the worker to keep: the original is closed in the child with all the parent's
    descriptors."""
    copy_fd = os.dup(fd)
    opened.callback(os.close, copy_fd)
    return copy_fd


def _pipe(opened: ExitStack) -> tuple[int, int]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    opened.callback(os.close, read_fd)
    opened.callback(os.close, write_fd)
    os.set_blocking(read_fd, False)
    return read_fd, write_fd
