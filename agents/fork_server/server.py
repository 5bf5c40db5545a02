"""The fork server: has imported torch and Megatron, so that a worker starts in tens of milliseconds.

    python -m agents.fork_server --run-dir DIR --address 127.0.0.1

Rules
-----
* One thread, no process group, no CUDA context, ever: it must be able to fork at any moment. It waits in one
  `select` and is woken by sockets, pipes and SIGCHLD; nothing is polled.
* It is the parent of the node's workers and of its rendezvous store, and adopts their orphans. If it dies, the
  kernel kills them (PR_SET_PDEATHSIG): no worker runs on unattended.
* It outlives the agent and serves the newest connection alone. A new agent receives the exits that no agent has
  acknowledged, then the inventory. Without an agent for the lease time it kills all and ends: another node may
  have been given its work by then (self-fencing).
* A worker's stdout and stderr come through a pipe into its log; an exit is reported once what the pipe held is
  written. What a dead worker left in its process group is killed with it.
* A SIGKILL that was not sent from here may have been the kernel's: the witnesses are asked before the exit is reported.
* The store's listening socket belongs to the fork server: a store that dies is replaced on the same port.
* It holds the memory of the node's shards' states (protocol/memory.py): one memfd for each, made with the first
  worker of the shard or when the agent wants to keep a copy, given up when the agent says so, gone with it.
* A Spawn for a worker that lives is answered again and not done again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from agents.bound_path import BoundPath
from agents.fork_server.oom import OomWitness
from agents.fork_server.worker_process import HANDLED_SIGNALS, become_worker, detach
from agents.prctl import adopt_orphans
from agents.protocol.framing import BadFrame, Unframer, frame
from agents.protocol.gpus import visible_gpus
from agents.protocol.messages import (
    Exited,
    ExitedAck,
    Forget,
    Forked,
    FromForkServer,
    Inventory,
    InventoryWorker,
    Keep,
    KeepFailed,
    Kept,
    Kill,
    Launch,
    OomKill,
    Retire,
    Spawn,
    SpawnFailed,
    ToForkServer,
)
from agents.rotated_log import RotatedLog
from events.vocabulary import Name, WorkerId

logger = logging.getLogger("agents.fork_server")

#: Another fork server holds the run directory.
EXIT_OCCUPIED = 3
#: Said on --ready-fd once agents may connect.
READY = b"ready\n"
_CHUNK_BYTES = 65536
#: How much of a dead worker's pipe is written before its exit is reported (a pipe holds 64 KiB unless enlarged).
_DRAIN_BYTES = 4 * 1024 * 1024
_STORE_BACKLOG = 1024
_STORE_PAUSE_MIN_S = 0.05
_STORE_PAUSE_MAX_S = 5.0
_END_TIMEOUT_S = 5.0
#: How often an agent that is away is looked out for: somebody may have unlinked the socket that it will look for.
_LOOK_EVERY_S = 1.0


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


@dataclass(slots=True)
class _Agent:
    """The one connection that is served."""

    connection: socket.socket
    incoming: Unframer[ToForkServer]
    outgoing: bytearray


class _Retired(Exception):
    """The reason why the fork server ends."""


class ForkServer:
    """See the module's rules. `run` and `serve_store` are called in children, never here."""

    def __init__(
        self,
        run_dir: Path,
        *,
        address: str,
        lease_s: float,
        memory_max_bytes: int,
        run: Callable[[Launch], object],
        serve_store: Callable[[socket.socket], object],
    ) -> None:
        self._socket_path = run_dir / "fork.sock"
        self._lease_s = lease_s
        self._memory_max_bytes = memory_max_bytes
        self._memories: dict[tuple[Name, int], int] = {}
        self._run = run
        self._serve_store = serve_store
        self._gpus = visible_gpus()
        self._oom = OomWitness()
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker] = {}
        self._pids: dict[WorkerId, int] = {}
        self._exits: dict[WorkerId, Exited] = {}
        self._outputs: dict[int, _Output] = {}
        self._agent: _Agent | None = None
        self._lonely_since_s = time.monotonic()
        self._store_pid = 0
        self._store_forked_s = 0.0
        self._store_pause_s = _STORE_PAUSE_MIN_S
        self._ending = False

        self._lock_fd = os.open(run_dir / "fork.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            raise SystemExit(EXIT_OCCUPIED) from None
        self._store_listener = _listen_tcp(address)
        self._listener = _listen_unix(self._socket_path)
        self._bound = BoundPath(self._socket_path)
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)

    # --- the loop --------------------------------------------------------------------------------

    def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until retired; then all children are gone. `on_ready`: agents may connect now."""
        adopt_orphans()
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up is all that is wanted
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        on_ready()  # before the first fork: no child shall hold what it writes to
        self._fork_store()
        try:
            while True:
                for key, events in self._selector.select(self._timeout_s()):
                    # A callback may have closed what comes later in the same batch.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data(events)
                self._end_if_lonely()
                self._stay_bound()
                self._revive_store()
        except _Retired as reason:
            logger.info("ending: %s", reason)
        finally:
            self._end()

    def _timeout_s(self) -> float | None:
        """Until the lease or the store's pause is over; None: only events matter."""
        due: list[float] = []
        if self._agent is None:
            due.append(self._lonely_since_s + self._lease_s)
            due.append(time.monotonic() + _LOOK_EVERY_S)
        if not self._store_pid:
            due.append(self._store_forked_s + self._store_pause_s)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _on_sigterm(self, *_: object) -> None:
        self._ending = True

    def _woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        self._reap()
        if self._ending:
            raise _Retired("SIGTERM")

    # --- the agent -------------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            logger.warning("an agent could not be accepted: %s", error)
            return
        if (uid := _peer_uid(connection)) != os.getuid():
            logger.warning("refused a connection of uid %d: it is not this user's", uid)
            connection.close()
            return
        self._drop_agent("a newer agent has connected")
        connection.setblocking(False)
        self._agent = _Agent(connection, Unframer(ToForkServer), bytearray())
        self._selector.register(connection, selectors.EVENT_READ, self._talk)
        for exited in self._exits.values():
            self._say(exited)
        self._say(self._inventory())

    def _stay_bound(self) -> None:
        """Without an agent: the next one must find the socket, or the workers end with the lease."""
        if self._agent is not None or self._bound.holds():
            return
        try:
            listener = _listen_unix(self._socket_path)
            self._bound = BoundPath(self._socket_path)
        except OSError as error:
            logger.error("%s is gone and cannot be bound again: %s", self._socket_path, error)
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        logger.warning("%s was gone: bound again", self._socket_path)

    def _inventory(self) -> Inventory:
        workers = [
            InventoryWorker(worker=w.worker, task=w.task, pid=w.pid, slot=w.slot) for w in self._workers.values()
        ]
        kept = tuple(self._kept(task, shard) for task, shard in self._memories)
        return Inventory(store_port=self._store_listener.getsockname()[1], workers=tuple(workers), kept=kept)

    def _drop_agent(self, why: str) -> None:
        agent = self._agent
        if agent is None:
            return
        logger.info("the agent is gone: %s", why)
        self._agent = None
        self._lonely_since_s = time.monotonic()
        self._selector.unregister(agent.connection)
        agent.connection.close()

    def _end_if_lonely(self) -> None:
        if self._agent is None and time.monotonic() - self._lonely_since_s >= self._lease_s:
            raise _Retired(f"no agent for {self._lease_s:g} s")

    def _say(self, message: FromForkServer) -> None:
        if self._agent is not None:
            self._agent.outgoing += frame(message)
            self._flush()

    def _flush(self) -> None:
        agent = self._agent
        if agent is None:
            return
        try:
            while agent.outgoing:
                del agent.outgoing[: agent.connection.send(agent.outgoing)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop_agent(f"{error.strerror}")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if agent.outgoing else 0)
        self._selector.modify(agent.connection, wanted, self._talk)

    def _talk(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        agent = self._agent
        if agent is None or not events & selectors.EVENT_READ:
            return
        try:
            data = agent.connection.recv(_CHUNK_BYTES)
            messages = agent.incoming.feed(data)
        except BlockingIOError:
            return
        except BadFrame as error:
            self._drop_agent(f"bad frame: {error}")
            return
        except OSError as error:
            self._drop_agent(f"{error.strerror}")
            return
        for message in messages:
            self._obey(message)
        if not data:
            self._drop_agent("the agent closed the connection")

    def _obey(self, message: ToForkServer) -> None:
        match message:
            case Spawn():
                self._spawn(message)
            case Kill(worker=worker, signal=number):
                self._kill(worker, number)
            case ExitedAck(worker=worker):
                self._exits.pop(worker, None)
            case Keep(task=task, shard=shard):
                self._keep(task, shard)
            case Forget(task=task):
                self._forget(task)
            case Retire():
                raise _Retired("the agent ends it")

    # --- workers ---------------------------------------------------------------------------------

    def _spawn(self, spawn: Spawn) -> None:
        launch = spawn.launch
        worker = launch.worker
        if worker in self._pids:
            self._say(Forked(worker=worker, pid=self._pids[worker]))
            return
        if worker in self._exits:
            self._say(self._exits[worker])
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

        if self._memory_max_bytes and (fd := self._keep(launch.task, launch.shard)) >= 0:
            path = f"/proc/{self._pid}/fd/{fd}"
            launch = msgspec.structs.replace(launch, memory=path, memory_max_bytes=self._memory_max_bytes)

        def child() -> NoReturn:
            self._store_listener.close()
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

    # --- the memory of states --------------------------------------------------------------------

    def _keep(self, task: Name, shard: int) -> int:
        """The descriptor of the shard's memory, there from now on; -1 where there is none to be had."""
        if (task, shard) not in self._memories:
            try:
                self._memories[task, shard] = os.memfd_create(f"unicron {task}/{shard}", os.MFD_CLOEXEC)
            except OSError as error:
                self._say(KeepFailed(task=task, shard=shard, reason=str(error)))
                return -1
        self._say(self._kept(task, shard))
        return self._memories[task, shard]

    def _kept(self, task: Name, shard: int) -> Kept:
        return Kept(task=task, shard=shard, fd=self._memories[task, shard], max_bytes=self._memory_max_bytes)

    def _forget(self, task: str) -> None:
        for key in [key for key in self._memories if task in ("", key[0])]:
            os.close(self._memories.pop(key))

    def _fork(self, child: Callable[[], object]) -> int:
        """A detached child that runs `child` and ends; its pid. The child never comes back here."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = self._pid
        # A signal that comes before the child has its own handlers must wait for them, not meet ours.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
            return pid
        try:
            detach(parent, self._close_all)
            child()
        finally:
            os._exit(1)

    def _close_all(self) -> None:
        """Every descriptor that is the fork server's own, but for the store's listener."""
        self._selector.close()
        sockets = [self._listener, self._wake_read, self._wake_write]
        if self._agent is not None:
            sockets.append(self._agent.connection)
        for one in sockets:
            one.close()
        for fd in (self._lock_fd, *self._outputs, *self._memories.values()):
            os.close(fd)
        self._oom.close()
        for output in self._outputs.values():
            output.log.close()

    def _kill(self, worker: WorkerId, number: int) -> None:
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

    # --- ends ------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Take in every child that has ended, our own or adopted."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            worker = self._workers.pop(pid, None)
            if worker is not None or pid == self._store_pid:
                # While it is not waited for, its pid, and so its group's id, belongs to no other process.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if worker is not None:
                self._worker_ended(worker, status)
            elif pid == self._store_pid and not self._ending:
                self._store_ended(status)

    def _worker_ended(self, worker: _Worker, status: int) -> None:
        if worker.output.fd in self._outputs:
            self._pump(worker.output, _DRAIN_BYTES)
        del self._pids[worker.worker]
        oom: OomKill = "no"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not worker.killed:
            oom = self._oom.ended(worker.pid)
        else:
            self._oom.forget(worker.pid)
        exited = Exited(worker=worker.worker, pid=worker.pid, status=status, oom=oom)
        self._exits[worker.worker] = exited
        self._say(exited)

    def _end(self) -> None:
        """Kill and reap all descendants, close everything."""
        self._ending = True
        self._drop_agent("the fork server ends")
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
                elif key.fd in self._outputs:
                    key.data(selectors.EVENT_READ)
        self._socket_path.unlink(missing_ok=True)
        signal.set_wakeup_fd(-1)
        self._close_all()
        self._store_listener.close()

    # --- the rendezvous store --------------------------------------------------------------------

    def _fork_store(self) -> None:
        self._store_forked_s = time.monotonic()
        self._store_pid = self._fork(lambda: self._serve_store(self._store_listener))

    def _store_ended(self, status: int) -> None:
        lived_s = time.monotonic() - self._store_forked_s
        self._store_pid = 0
        self._store_pause_s = (
            _STORE_PAUSE_MIN_S if lived_s > _STORE_PAUSE_MAX_S else min(self._store_pause_s * 2, _STORE_PAUSE_MAX_S)
        )
        self._store_forked_s = time.monotonic()
        logger.error(
            "the rendezvous store ended (status %d) after %.1f s; another takes its port in %.2f s. "
            "Groups that were forming there time out and form again",
            status,
            lived_s,
            self._store_pause_s,
        )

    def _revive_store(self) -> None:
        if not self._store_pid and time.monotonic() - self._store_forked_s >= self._store_pause_s:
            self._fork_store()


def _listen_unix(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # ours by the lock: a leftover of one that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(8)
    listener.setblocking(False)
    return listener


def _listen_tcp(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
    except OSError as error:
        listener.close()
        reason = f"address: cannot listen on {address}: {error.strerror}; give an address of this node"
        raise SystemExit(reason) from None
    listener.listen(_STORE_BACKLOG)
    return listener


def _children() -> list[int]:
    """All our children, also those whose own parent has died."""
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def imported(path: str) -> Any:
    """The object at "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def main(argv: list[str] | None = None) -> NoReturn:
    """Parse the flags, preload, serve, exit."""
    parser = argparse.ArgumentParser(
        prog="python -m agents.fork_server", description="Started by unicron-agent; not for people."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1", help="where the rendezvous store listens")
    parser.add_argument("--lease-s", type=float, default=60.0, help="ends itself after this long without an agent")
    parser.add_argument("--memory-max-bytes", type=int, default=0, help="limit of each shard's memory; 0: keep none")
    parser.add_argument("--preload", default="agents.trainer.preload", help="module with the heavy imports")
    parser.add_argument("--worker", default="agents.trainer.worker:run", help="function that a worker runs")
    parser.add_argument(
        "--store", default="agents.trainer.groups.rendezvous_store:serve", help="function that the store runs"
    )
    parser.add_argument("--ready-fd", type=int, default=-1, help="notified when agents may connect")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def announce() -> None:
        if options.ready_fd >= 0:
            os.write(options.ready_fd, READY)
            os.close(options.ready_fd)

    begun_s = time.monotonic()
    importlib.import_module(options.preload)
    run, serve_store = imported(options.worker), imported(options.store)
    server = ForkServer(
        options.run_dir,
        address=options.address,
        lease_s=options.lease_s,
        memory_max_bytes=options.memory_max_bytes,
        run=run,
        serve_store=serve_store,
    )
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    if threads > 1 or threading.active_count() > 1:
        logger.error("the preloaded modules have started %d threads: forked workers may hang", threads - 1)
    gc.collect()
    gc.freeze()  # what is here stays: collections in children shall not copy its pages
    logger.info("preloaded in %.1f s, serving %s", time.monotonic() - begun_s, options.run_dir)
    server.serve(announce)
    sys.exit(0)


if __name__ == "__main__":
    main()
