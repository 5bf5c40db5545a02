"""The node's workers as children: born, heard through a pipe, killed, and their ends reported until acknowledged.

A worker's output is in its log before its exit is reported. A SIGKILL that was not sent from here may have been the
kernel's: the witnesses are asked first.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from agents.fork_server.memories import Memories
from agents.fork_server.oom import OomWitness
from agents.fork_server.worker_process import become_worker
from agents.protocol.gpus import visible_gpus
from agents.protocol.messages import (
    Exited,
    Forked,
    FromForkServer,
    InventoryWorker,
    Launch,
    OomKill,
    Spawn,
    SpawnFailed,
)
from agents.rotated_log import RotatedLog
from events.vocabulary import Name, WorkerId

_CHUNK_BYTES = 65536
#: How much of a dead worker's pipe is written before its exit is reported (a pipe holds 64 KiB unless enlarged).
_DRAIN_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class _Output:
    """The read end of a worker's pipe and the log that it goes to."""

    fd: int
    log: RotatedLog


@dataclass(slots=True)
class _Worker:
    worker: WorkerId
    task: Name
    pid: int
    slot: int
    output: _Output
    #: A SIGKILL was sent from here.
    killed: bool = False


class Workers:
    """`run`: called in children, never here. `fork(child)`: gives the pid. `say`: to the agent."""

    def __init__(
        self,
        run: Callable[[Launch], object],
        fork: Callable[[Callable[[], object]], int],
        say: Callable[[FromForkServer], None],
        selector: selectors.BaseSelector,
        memories: Memories,
    ) -> None:
        self._run = run
        self._fork = fork
        self._say = say
        self._selector = selector
        self._memories = memories
        self._gpus = visible_gpus()
        self._oom = OomWitness()
        self._pid = os.getpid()
        self._workers: dict[int, _Worker] = {}
        self._pids: dict[WorkerId, int] = {}
        self._outputs: dict[int, _Output] = {}
        #: Ends that no agent has acknowledged.
        self.exits: dict[WorkerId, Exited] = {}

    def inventory(self) -> tuple[InventoryWorker, ...]:
        """Those that live."""
        return tuple(
            InventoryWorker(worker=w.worker, task=w.task, pid=w.pid, slot=w.slot) for w in self._workers.values()
        )

    def has(self, pid: int) -> bool:
        """Whether `pid` is a worker's."""
        return pid in self._workers

    def is_output(self, fd: int) -> bool:
        """Whether a worker's pipe is read from `fd`."""
        return fd in self._outputs

    def close(self) -> None:
        """In a child, or at the end: every descriptor."""
        for fd in self._outputs:
            os.close(fd)
        self._oom.close()
        for output in self._outputs.values():
            output.log.close()

    def spawn(self, spawn: Spawn) -> None:
        """Fork a worker, or say why not. One that lives or has ended is answered again."""
        launch = spawn.launch
        worker = launch.worker
        if worker in self._pids:
            self._say(Forked(worker=worker, pid=self._pids[worker]))
            return
        if worker in self.exits:
            self._say(self.exits[worker])
            return
        try:
            self._require_startable(spawn)
            log = RotatedLog(Path(spawn.log_path))
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            reason = f"{error.strerror}: {error.filename}" if error.filename else f"{error.strerror}"
            self._say(SpawnFailed(worker=worker, reason=reason[:1024]))
            return
        os.set_blocking(read_fd, False)

        if self._memories.max_bytes and (fd := self._memories.keep(launch.task, launch.shard)) >= 0:
            path = f"/proc/{self._pid}/fd/{fd}"
            launch = msgspec.structs.replace(launch, memory=path, memory_max_bytes=self._memories.max_bytes)

        def child() -> NoReturn:
            os.close(read_fd)
            log.close()
            become_worker(launch, output_fd=write_fd, gpus=self._gpus, slot=spawn.slot, run=self._run)

        pid = self._fork(child)
        os.close(write_fd)
        output = _Output(read_fd, log)
        self._outputs[read_fd] = output
        self._selector.register(read_fd, selectors.EVENT_READ, lambda _: self._pump(output))
        self._oom.born(pid)
        self._workers[pid] = _Worker(worker, launch.task, pid, spawn.slot, output)
        self._pids[worker] = pid
        self._say(Forked(worker=worker, pid=pid))

    def _require_startable(self, spawn: Spawn) -> None:
        cwd = spawn.launch.spec.cwd
        if cwd and not os.access(cwd, os.X_OK):
            raise FileNotFoundError(2, "the task's cwd is not a directory that this node can enter", cwd)
        if self._gpus and spawn.slot >= len(self._gpus):
            raise OSError(
                19, f"slot {spawn.slot} has no GPU: the node has {len(self._gpus)}; start it with fewer slots"
            )

    def kill(self, worker: WorkerId, number: int) -> None:
        """Signal `number` to the worker's process group, while it lives."""
        pid = self._pids.get(worker)
        if pid is None:
            return  # it has ended, and its pid may be another's by now
        self._workers[pid].killed |= number == signal.SIGKILL
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # it has not come to its setsid yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pump(self, output: _Output, limit_bytes: int = _CHUNK_BYTES) -> None:
        """Carry what the pipe holds into the log, at most `limit_bytes`; close both at the end of the stream."""
        while limit_bytes > 0:
            try:
                data = os.read(output.fd, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(output.fd)
                del self._outputs[output.fd]
                os.close(output.fd)
                output.log.close()
                return
            output.log.write(data)
            limit_bytes -= len(data)

    def ended(self, pid: int, status: int) -> None:
        """The worker has ended and was waited for: drain its pipe, then report."""
        worker = self._workers.pop(pid)
        if worker.output.fd in self._outputs:
            self._pump(worker.output, _DRAIN_BYTES)
        del self._pids[worker.worker]
        oom: OomKill = "no"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not worker.killed:
            oom = self._oom.ended(worker.pid)
        else:
            self._oom.forget(worker.pid)
        exited = Exited(worker=worker.worker, pid=worker.pid, status=status, oom=oom)
        self.exits[worker.worker] = exited
        self._say(exited)
