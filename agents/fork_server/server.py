"""The fork server: imports torch and Megatron once and forks workers, so that a worker starts in tens of milliseconds.

    python -m unicrond.agents.fork_server --run-dir DIR --address 127.0.0.1

Rules
-----
* One thread, no process group, no CUDA context, ever: it must be able to fork at any moment. It waits in one
  `select` and is woken by sockets, pipes and SIGCHLD; nothing is polled.
* It is the parent of the node's workers and of its rendezvous store, and adopts their orphans. If it dies, the
  kernel kills them (PR_SET_PDEATHSIG): no worker runs on unattended.
* It outlives the agent and serves the newest connection alone. A new agent receives the exits that no agent has
  acknowledged, then the inventory. Without an agent for the lease time it kills all and ends: another node may
  have its work by then (self-fencing).
* The processes that a dead worker has left in its process group are killed with it.
* A Spawn for a worker that lives is answered again and not done again.
* Where it has the privilege to run workers as other users, it imports no task's modules: these are imported by the
  worker, or by the task's own preloader (preloaders.py), after the drop (privileges.py), and no process that listens to
  others keeps the privilege.

What does not live here: workers (workers.py), their memory (memory_files.py), the store (store.py), the line to the
agent (agent_line.py), the flags (__main__.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from unicrond.agents.fork_server.agent_line import AgentLine, Retired
from unicrond.agents.fork_server.memory_files import Memories
from unicrond.agents.fork_server.store import StoreProcess
from unicrond.agents.fork_server.worker_process import HANDLED_SIGNALS, detach
from unicrond.agents.fork_server.workers import ChildPrograms, Separation, Workers
from unicrond.agents.host.prctl import adopt_orphans, drop_capabilities, gain_nothing
from unicrond.agents.protocol.messages import (
    FromForkServer,
    Inventory,
    Kill,
    ProcessExitAck,
    ReleaseMemory,
    ReserveMemory,
    Retire,
    Spawn,
    Sum,
    ToForkServer,
)
from unicrond.agents.protocol.peers import agent_schema, plain
from unicrond.events.vocabulary.shape import Shape
from unicrond.events.wire.schemas import SCHEMA

logger = logging.getLogger("unicrond.agents.fork_server")

#: Another fork server holds the run directory.
EXIT_OCCUPIED = 3
#: Written to --ready-fd once agents may connect.
READY = b"ready\n"
_END_TIMEOUT_S = 5.0


class ForkServer:
    """The fork server of one run directory; see the module's rules. `address`: where the rendezvous store listens.
    `lease_s`: how long it lives without an agent. `memory_max_bytes`: of each shard's memory, 0: none is kept."""

    def __init__(
        self,
        run_dir: Path,
        programs: ChildPrograms,
        separation: Separation,
        *,
        address: str,
        lease_s: float,
        memory_max_bytes: int,
    ) -> None:
        self._agent_socket = str(run_dir / "agent.sock")
        self._socket_path = run_dir / "fork.sock"
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._ending = False

        self._lock_fd = os.open(run_dir / "fork.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            raise SystemExit(EXIT_OCCUPIED) from None
        self._store = StoreProcess(address, programs.serve_store, self._fork_unprivileged)
        self._programs = programs
        self._line = AgentLine(self._socket_path, lease_s, self._selector, self._greeting, self._handle)
        self._memories = Memories(memory_max_bytes, self._line.send)
        self._separates = separation.users
        self._workers = Workers(
            programs, self._fork_worker, self._line.send, self._selector, self._memories, run_dir, separation
        )
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)

    # --- the loop --------------------------------------------------------------------------------

    def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until retired; all children have ended then. `on_ready` is called when agents may connect."""
        adopt_orphans()
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only the wake-up matters
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wakeup)
        self._workers.sweep()
        self._line.open()
        on_ready()  # before the first fork: no child shall hold the descriptor that it writes to
        self._store.start()
        try:
            while True:
                for key, events in self._selector.select(self._timeout_s()):
                    # A callback may have closed a descriptor that comes later in the same batch.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data(events)
                self._line.look()
                self._store.revive()
        except Retired as reason:
            logger.info("ending: %s", reason)
        finally:
            self._end()

    def _timeout_s(self) -> float | None:
        """Return the time until the lease or the store's pause is over; None: only events matter."""
        due_s = self._line.due_s()
        if (store_due_s := self._store.due_s()) is not None:
            due_s.append(store_due_s)
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _on_sigterm(self, *_: object) -> None:
        self._ending = True

    def _on_wakeup(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        self._reap()
        self._workers.separation.cgroups.tidy()
        if self._ending:
            raise Retired("SIGTERM")

    # --- the agent -------------------------------------------------------------------------------

    def _greeting(self) -> Iterator[FromForkServer]:
        yield from tuple(self._workers.exits.values())
        inventory = Inventory(
            store_port=self._store.port,
            workers=self._workers.inventory(),
            reserved_memory=self._memories.regions(),
            schema=SCHEMA,
            separates=self._separates,
            degrees=Shape._fields,
        )
        yield plain(inventory, agent_schema(self._agent_socket))

    def _handle(self, message: ToForkServer) -> None:
        match message:
            case Spawn():
                self._workers.spawn(message)
            case Kill(worker=worker, signal=number):
                self._workers.kill(worker, number)
            case ProcessExitAck(worker=worker):
                self._workers.acknowledged(worker)
            case ReserveMemory(task=task, shard=shard):
                self._memories.reserve(task, shard)
            case ReleaseMemory(task=task):
                self._memories.release(task)
                self._workers.preloaders.forget(task)
            case Sum():
                self._sum(message)
            case Retire():
                raise Retired("the agent's order")

    # --- children --------------------------------------------------------------------------------

    def _fork(self, child: Callable[[], object]) -> int:
        """Fork a detached child that runs `child` and ends; return its pid. The child never comes back here."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = self._pid
        # A signal that comes before the child has its own handlers must wait for them, not meet ours.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
            raise
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
            return pid
        try:
            detach(parent, self._close_all)
            child()
        finally:
            os._exit(1)

    def _fork_unprivileged(self, child: Callable[[], object]) -> int:
        """Fork a child that speaks to the network (the store, a sum with other nodes): it needs no privilege, and has
        none."""

        def unprivileged() -> None:
            if self._separates:
                gain_nothing()
                drop_capabilities()
            child()

        return self._fork(unprivileged)

    def _sum(self, order: Sum) -> None:
        """Fork the summing process, which sends its result to the agent itself."""

        def without_store() -> None:
            self._store.listener.close()
            self._programs.add_up(order)

        try:
            self._fork_unprivileged(without_store)
        except OSError as error:
            logger.error("no process could be forked for a sum with other nodes: %s", error)

    def _fork_worker(self, child: Callable[[], object]) -> int:
        def without_store() -> None:
            self._store.listener.close()
            child()

        return self._fork(without_store)

    def _close_all(self) -> None:
        """Close every descriptor that is the fork server's own, but for the store's listener."""
        self._selector.close()
        for end in (self._wake_read, self._wake_write):
            end.close()
        os.close(self._lock_fd)
        self._line.close()
        self._memories.close()
        self._workers.close()

    def _reap(self) -> None:
        """Wait for every child that has ended, our own or adopted."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            is_worker, is_store = self._workers.has(pid), pid == self._store.pid
            is_preloader = self._workers.preloaders.has(pid)
            if is_worker or is_store or is_preloader:
                # While it is not waited for, its pid, and so its group's id, belongs to no other process.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if is_worker:
                self._workers.ended(pid, status)
            elif is_preloader:
                self._workers.preloaders.ended(pid)
            elif is_store and not self._ending:
                self._store.ended(status)

    def _end(self) -> None:
        """Kill and reap all descendants, close everything."""
        self._ending = True
        self._line.drop("the fork server ends")
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        while (children := _children()) and (left_s := deadline_s - time.monotonic()) > 0:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for key, _ in self._selector.select(left_s):
                if key.fileobj is self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                    self._reap()
                elif self._workers.is_output(key.fd):
                    key.data(selectors.EVENT_READ)
        self._socket_path.unlink(missing_ok=True)
        signal.set_wakeup_fd(-1)
        self._close_all()
        self._store.listener.close()


def _children() -> list[int]:
    """Return all our children, also those whose own parent has died."""
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]
