"""A rig for the trainer alone: real workers, real sockets and messages, no NATS, no coordinator.

The test plays agent and coordinator: it starts workers, tells them memberships, reads what they say. A helper process
(this file, run as a module) has imported torch and Megatron, holds the rendezvous store in a child, and forks workers:
in small what `agents/fork_server/server.py` is in earnest.

    with ForkServer() as server, Rig(server, tmp_path, spec) as rig:
        rig.start("t.1", "t.2", "t.3")
        rig.tell(1, ["t.1", "t.2", "t.3"])
        rig.until(lambda: rig.completed)

Run as a script, it trains through that many rounds of random mishaps:

    python -m tests.integration.regroup_rig 50 --seed 1 --tp 2
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from unicrond.agents.protocol import marks
from unicrond.agents.protocol.framing import Unframer, frame
from unicrond.agents.protocol.memory import Memory
from unicrond.agents.protocol.messages import (
    ConnectionOwner,
    FromWorker,
    GroupMembership,
    Hello,
    Inventory,
    IterationCommitted,
    Kill,
    Launch,
    Passes,
    ProcessExited,
    ProcessForked,
    Quit,
    Spawn,
    ToForkServer,
    ToWorker,
)
from unicrond.events.vocabulary import (
    CheckpointSaved,
    ErrorReported,
    Member,
    MemoryService,
    StoreAddress,
    TaskCompleted,
    TaskSpec,
    WorkerJoinedGroup,
    WorkerReady,
)

S = TypeVar("S", bound=msgspec.Struct)
FromServer = ProcessForked | ProcessExited | Inventory
ADDRESS = "127.0.0.1"
MEMORY_MAX_BYTES = 64 * 1024 * 1024


# --- the helper process --------------------------------------------------------------------------


def serve(fd: int) -> None:
    """Fork what is asked for, tell what ended, until the connection ends."""
    import torch.distributed as dist

    import unicrond.agents.trainer.entry.preload  # noqa: F401
    from unicrond.agents.fork_server.worker_lines import Lines
    from unicrond.agents.protocol import worker_line as line
    from unicrond.agents.protocol.gpus import visible_gpus
    from unicrond.agents.trainer.entry import worker

    gpus = visible_gpus()

    read, write = os.pipe()
    store = os.fork()
    if store == 0:
        os.close(read)
        server = dist.TCPStore(ADDRESS, 0, None, True, wait_for_workers=False)
        os.write(write, str(server.port).encode())
        os.close(write)
        signal.pause()
    port = int(os.read(read, 16))
    os.close(read)
    os.close(write)
    wake_read, wake_write = socket.socketpair()
    wake_write.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno())
    connection = socket.socket(fileno=fd)
    connection.sendall(frame(Inventory(store_port=port, workers=())))
    incoming: Unframer[ToForkServer] = Unframer(ToForkServer)
    living: dict[int, str] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if callable(key.data):
                    key.data(0)
                    continue
                if key.fileobj is wake_read:
                    wake_read.recv(4096)
                    for pid, status in _reap():
                        if pid in living:
                            name = living.pop(pid)
                            connection.sendall(frame(ProcessExited(worker=name, pid=pid, status=status)))
                    continue
                data = connection.recv(65536)
                if not data:
                    for pid in living:
                        os.killpg(pid, signal.SIGKILL)
                    os.kill(store, signal.SIGKILL)
                    os._exit(0)
                for message in incoming.feed(data):
                    if isinstance(message, Spawn):
                        launch = message.launch
                        ours, theirs = line.pair()
                        pid = os.fork()
                        if pid == 0:
                            os.setpgid(0, 0)
                            connection.close()
                            ours.close()
                            signal.set_wakeup_fd(-1)
                            log = os.open(message.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                            os.dup2(log, 1)
                            os.dup2(log, 2)
                            if gpus:
                                os.environ["CUDA_VISIBLE_DEVICES"] = gpus[message.slot % len(gpus)]
                            os.environ.update(launch.spec.env)
                            if launch.spec.cwd:
                                os.chdir(launch.spec.cwd)
                            worker.run(_replace(launch, line_fd=theirs.detach()))
                        os.setpgid(pid, pid)  # here too: it may be killed at once
                        theirs.close()
                        whose = ConnectionOwner(worker=launch.worker, task=launch.task, pid=pid)
                        Lines(Path(launch.agent_socket), selector).serve(ours, whose)
                        living[pid] = message.launch.worker
                        connection.sendall(frame(ProcessForked(worker=message.launch.worker, pid=pid)))
                    elif isinstance(message, Kill):
                        for pid, name in living.items():
                            if name == message.worker:
                                os.kill(pid, message.signal)


def _reap() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(child)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child[0], signal.SIGKILL)  # what it left in its process group goes with it, as on a node
    return ended


class ForkServer:
    """The helper process; started once, used by many rigs one after the other."""

    def __enter__(self) -> ForkServer:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as fork_link.py does
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.regroup_rig", "serve", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        theirs.close()
        self.connection = ours
        self.incoming: Unframer[FromServer] = Unframer(FromServer)
        ours.settimeout(240)  # it imports torch first: a minute and more on a busy machine
        while True:
            for message in self.incoming.feed(self.connection.recv(65536)):
                if isinstance(message, Inventory):
                    self.store = StoreAddress(host=ADDRESS, port=message.store_port)
                    return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.process.wait(30)


# --- the test's side -----------------------------------------------------------------------------


class Rig:
    """Plays the agent of all workers of one task. `said`: everything they said, in order of arrival."""

    _tasks = 0

    def __init__(self, server: ForkServer, directory: Path, spec: TaskSpec) -> None:
        Rig._tasks += 1  # the store outlives a rig: its keys must not meet another's
        self.task = f"{spec.name}-{Rig._tasks}"
        self.checkpoints = directory / self.task
        self.spec = _replace(spec, name=self.task, checkpoint=_replace(spec.checkpoint, dir=str(self.checkpoints)))
        self.server = server
        self.directory = directory
        self.said: list[tuple[str, FromWorker]] = []
        self.exits: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        self.places: dict[str, tuple[int, int]] = {}
        self._first_replica = 0
        self.nodes: dict[str, str] = {}
        self.memories: dict[tuple[str, int], Memory] = {}
        self._memory_fds: list[int] = []
        self._connections: dict[str, socket.socket] = {}
        self._incoming: dict[socket.socket, Unframer[FromWorker | ConnectionOwner]] = {}
        self._named: dict[socket.socket, str] = {}
        self._newest: GroupMembership | None = None
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Rig:
        self._socket_dir = tempfile.TemporaryDirectory(prefix="rig")
        self.socket_path = str(Path(self._socket_dir.name) / "agent.sock")
        self._selector.register(self.server.connection, selectors.EVENT_READ)
        self.listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for worker in self.living():
            self.signal(worker, signal.SIGKILL)
        self.until(lambda: not self.living(), 60)
        self.hang_up()
        for memory in self.memories.values():
            memory.close()
        for fd in self._memory_fds:
            os.close(fd)
        self._selector.close()
        self._socket_dir.cleanup()
        if kind is not None:
            for log in sorted(self.directory.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-4000:]}")
            print(*(f"{worker} {message}" for worker, message in self.said[-60:]), sep="\n")

    # --- doing ------------------------------------------------------------------------------------

    def listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.socket_path)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def hang_up(self) -> None:
        """What the workers see of an agent's death."""
        for connection in [*self._incoming, self._listener]:
            self._selector.unregister(connection)
            connection.close()
        self._connections.clear()
        self._incoming.clear()
        self._named.clear()
        Path(self.socket_path).unlink()

    def memory(self, node: str, shard: int = 0) -> Memory:
        """What the node's fork server would hold of the shard's state; here the test does."""
        if (node, shard) not in self.memories:
            fd = os.memfd_create(f"{node}/{shard}", os.MFD_CLOEXEC)
            self.memories[node, shard] = Memory(f"/proc/{os.getpid()}/fd/{fd}", MEMORY_MAX_BYTES)
            self._memory_fds.append(fd)
        return self.memories[node, shard]

    def start(
        self, *workers: str, fault: str = "", spec: TaskSpec | None = None, node: str = "n1", memory: bool = False,
        slot: int = 0,
    ) -> None:  # fmt: skip
        """Start workers "name.number"; replica and shard follow from the order in which they are started. `slot`: which
        of the machine's GPUs, if it has any; with fewer GPUs than slots they share."""
        spec = self.spec if spec is None else _replace(spec, name=self.task, checkpoint=self.spec.checkpoint)
        for worker in workers:
            replica, shard = divmod(len(self.places), spec.replica_workers)
            self.places[worker] = self._first_replica + replica, shard
            environment = {**spec.env, **({"UNICRON_FAULT": fault} if fault else {})}
            self.nodes[worker] = node
            held = self.memory(node, self.places[worker][1]) if memory else None
            launch = Launch(
                worker=worker,
                task=self.task,
                node=node,
                memory=held.path if held else "",
                memory_max_bytes=held.max_bytes if held else 0,
                address=ADDRESS,
                agent_socket=self.socket_path,
                mark=str(marks.path_of(self.socket_path, worker)),
                replica=self.places[worker][0],
                shard=self.places[worker][1],
                store=self.server.store,
                spec=_replace(spec, env=environment),
            )
            spawn = Spawn(launch=launch, log_path=str(self.directory / f"{worker}.log"), slot=slot)
            self.server.connection.sendall(frame(spawn))

    def forget_memory(self, node: str) -> None:
        """The node is gone, and what it kept with it."""
        for key in [key for key in self.memories if key[0] == node]:
            self.memories.pop(key).close()

    def reshape(self, spec: TaskSpec) -> None:
        """From now on workers are started for the task in that form, the next with shard 0 of a new replica."""
        self.spec = _replace(spec, name=self.task, checkpoint=_replace(spec.checkpoint, dir=str(self.checkpoints)))
        self._first_replica = 1 + max((replica for replica, _ in self.places.values()), default=-1)
        self.places.clear()

    def tell(
        self, generation: int, workers: Sequence[str], *, joiners: Sequence[str] = (), urgent: bool = False,
        also: Sequence[str] = (), peers: Sequence[MemoryService] = (), mtbf_us: int = 0, handover: bool = False,
        passes: Passes | None = None,
    ) -> None:  # fmt: skip
        """Tell the membership to its members, to those that said Hello later as well, and to `also` (leavers)."""
        members = tuple(
            Member(worker=worker, node=self.nodes[worker], replica=self.places[worker][0], shard=self.places[worker][1])
            for worker in workers
        )
        membership = GroupMembership(
            generation=generation,
            members=members,
            joiners=tuple(joiners),
            urgent=urgent,
            store=self.server.store,
            peers=tuple(peers),
            mtbf_us=mtbf_us,
            handover=handover,
            passes=passes,
            storage_iteration=max((m.iteration for _, m in self.said if isinstance(m, CheckpointSaved)), default=0),
        )
        self._newest = membership
        for worker in [*workers, *also]:
            self._send(worker, membership)

    def quit(self, *workers: str) -> None:
        for worker in workers:
            self._send(worker, Quit(reason="the test is over"))

    def signal(self, worker: str, number: int) -> None:
        self.server.connection.sendall(frame(Kill(worker=worker, signal=number)))

    def until(self, done: Callable[[], object], timeout_s: float = 120.0) -> None:
        """Carry messages until `done()`. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not done():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(f"nothing came of it in {timeout_s} s; exits {self.exits}, living {self.living()}")
            self._carry(min(remaining_s, 0.05))  # not everything that is waited for comes as a message

    # --- seeing -----------------------------------------------------------------------------------

    def living(self) -> list[str]:
        return [worker for worker in self.pids if worker not in self.exits]

    def of(self, kind: type, worker: str | None = None) -> list[FromWorker]:
        return [message for who, message in self.said if isinstance(message, kind) and worker in (None, who)]

    @property
    def committed(self) -> list[IterationCommitted]:
        return [message for _, message in self.said if isinstance(message, IterationCommitted)]

    @property
    def completed(self) -> TaskCompleted | None:
        told = [message for _, message in self.said if isinstance(message, TaskCompleted)]
        return told[-1] if told else None

    def iterations(self) -> dict[int, IterationCommitted]:
        """The commits by iteration, in the order told. A new lead may repeat the last one, in the same words."""
        found: dict[int, IterationCommitted] = {}
        for message in self.committed:
            before = found.setdefault(message.iteration, message)
            same = (before.generation, before.samples_digest, before.loss, before.micro_batches_by_rank)
            assert same == (
                message.generation, message.samples_digest, message.loss, message.micro_batches_by_rank
            ), f"iteration {message.iteration} was committed twice: {before}, {message}"  # fmt: skip
        return found

    def reached(self, iteration: int) -> bool:
        return any(message.iteration >= iteration for message in self.committed)

    def ready(self, *workers: str) -> bool:
        return all(self.of(WorkerReady, worker) for worker in workers)

    # --- carrying ---------------------------------------------------------------------------------

    def _send(self, worker: str, message: ToWorker) -> None:
        connection = self._connections.get(worker)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(frame(message))

    def _carry(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            connection = key.fileobj
            if connection is self._listener:
                accepted, _ = self._listener.accept()
                self._incoming[accepted] = Unframer(FromWorker | ConnectionOwner)
                self._selector.register(accepted, selectors.EVENT_READ)
            elif connection is self.server.connection:
                for message in self.server.incoming.feed(self.server.connection.recv(65536)):
                    self._from_server(message)
            elif isinstance(connection, socket.socket):
                self._from_worker(connection)

    def _from_server(self, message: FromServer) -> None:
        if isinstance(message, ProcessForked):
            self.pids[message.worker] = message.pid
        elif isinstance(message, ProcessExited) and message.worker in self.pids:
            self.exits[message.worker] = message.status

    def _from_worker(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            del self._incoming[connection]
            worker = self._named.pop(connection, "")
            if self._connections.get(worker) is connection:
                del self._connections[worker]
            return
        for message in self._incoming[connection].feed(data):
            if isinstance(message, ConnectionOwner):
                continue
            if isinstance(message, Hello):
                self._named[connection] = message.worker
                self._connections[message.worker] = connection
                if self._newest is not None and any(m.worker == message.worker for m in self._newest.members):
                    self._send(message.worker, self._newest)
            self.said.append((self._named[connection], message))


def _replace(struct: S, **changes: object) -> S:
    return msgspec.structs.replace(struct, **changes)


# --- as a script ---------------------------------------------------------------------------------


class Storm:
    """Three replicas, and kills at random moments: of one, of a second while the first is being healed, of members
    and joiners while a joiner is being taken in. The membership follows at once, or late."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.draw = random.Random(seed)
        self.number = self.generation = 0
        self.replicas: list[tuple[str, ...]] = []
        self.joining: list[tuple[str, ...]] = []

    def pass_time(self, most_s: float) -> None:
        end = time.monotonic() + self.draw.random() * most_s
        with contextlib.suppress(TimeoutError):
            self.rig.until(lambda: False, max(0.0, end - time.monotonic()))

    def tell(self, urgent: bool) -> None:
        self.generation += 1
        members = [worker for replica in self.replicas for worker in replica]
        joiners = [worker for replica in self.joining for worker in replica]
        self.rig.tell(self.generation, members, joiners=joiners, urgent=urgent)

    def kill_one(self) -> str:
        """One rank at a random moment, and then the rest of its replica; tell the others, at once or late."""
        self.pass_time(0.1)
        replica = self.draw.choice(self.replicas)
        victim = self.draw.choice(replica)
        for worker in (victim, *replica):
            self.rig.signal(worker, signal.SIGKILL)
        self.rig.until(lambda: all(worker in self.rig.exits for worker in replica))
        self.pass_time(self.draw.choice([0.0, 0.03]))
        self.replicas.remove(replica)
        self.joining = [joiner for joiner in self.joining if joiner != replica]
        self.tell(urgent=True)
        return victim

    def refill(self) -> None:
        """Start what is missing, and tell a planned membership with it."""
        self.joining = []
        shards = self.rig.spec.replica_workers
        while len(self.replicas) + len(self.joining) < 3:
            self.joining.append(tuple(f"t.{self.number + shard}" for shard in range(1, shards + 1)))
            self.number += shards
        workers = [worker for replica in self.joining for worker in replica]
        self.rig.start(*workers)
        self.rig.until(lambda: self.rig.ready(*workers))
        self.replicas += self.joining
        self.tell(urgent=False)

    def settle(self) -> float:
        """Until all members have said that they are in the newest group, and have committed; milliseconds."""
        started, committed = time.monotonic(), len(self.rig.committed)

        def settled() -> bool:
            seats = [self.rig.of(WorkerJoinedGroup, worker) for replica in self.replicas for worker in replica]
            return all(told and told[-1].generation == self.generation for told in seats)  # type: ignore[attr-defined]

        self.rig.until(settled)
        self.rig.until(lambda: len(self.rig.committed) > committed)
        self.joining = []
        return (time.monotonic() - started) * 1e3

    def round(self) -> str:
        """One of the mishaps; what happened."""
        kind = self.draw.choice(["one", "two", "joining"])
        if kind == "joining":
            lost = [self.kill_one()]
            self.settle()
            self.refill()
            lost.append(self.kill_one())
        else:
            lost = [self.kill_one() for _ in range(1 if kind == "one" else 2)]
        healed_ms = self.settle()
        self.refill()
        self.settle()
        return f"{kind}: {', '.join(lost)} lost, next step after {healed_ms:.0f} ms"


def storm(server: ForkServer, rounds: int, seed: int, spec: TaskSpec, directory: Path) -> None:
    """Train under a storm, and look at every iteration's commit afterwards."""
    with Rig(server, directory, spec) as rig:
        drawn = Storm(rig, seed)
        drawn.refill()
        drawn.settle()
        for number in range(1, rounds + 1):
            print(f"{number}: {drawn.round()}, iteration {rig.committed[-1].iteration}", flush=True)
        iterations = rig.iterations()
        assert list(iterations) == list(range(1, len(iterations) + 1)), f"an iteration is missing in {list(iterations)}"
        assert all(message.samples == 8 for message in rig.committed)
        kinds = collections.Counter(
            message.kind for message in rig.of(ErrorReported) if isinstance(message, ErrorReported)
        )
        print(f"{rounds} rounds, {len(iterations)} iterations, loss {rig.committed[-1].loss:.4f}, {dict(kinds)}")
        staying = rig.living()
        rig.quit(*staying)
        rig.until(lambda: not rig.living())
        assert {rig.exits[worker] for worker in staying} == {0}


def main() -> None:
    parser = argparse.ArgumentParser(description=storm.__doc__)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    chosen = parser.parse_args()
    spec = TaskSpec(name="storm", global_batch=8, iterations=10**6, tp=chosen.tp, pp=chosen.pp)
    with ForkServer() as server, tempfile.TemporaryDirectory() as scratch:
        storm(server, chosen.rounds, chosen.seed, spec, Path(scratch))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        main()
