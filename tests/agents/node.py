"""A node for tests of the core: a state, its actions applied to a model of the fork server and the workers.

The model keeps what the real ones keep: who lives, in which slot, which exits are unacknowledged. It checks
on every step what must always hold.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from unicrond.agents.core import machine as core
from unicrond.agents.core.agent_config import AgentConfig
from unicrond.agents.core.state import (
    Action,
    AgentState,
    Append,
    Appended,
    ArmTimer,
    Commanded,
    Finish,
    ForkServerDied,
    ForkServerSaid,
    Input,
    LogDecision,
    LogSeen,
    Remembered,
    TellForkServer,
    TellWorker,
    TimerFired,
    WorkerConnected,
    WorkerSaid,
)
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import (
    FromWorker,
    GroupMembership,
    Hello,
    Inventory,
    InventoryWorker,
    IterationCommitted,
    Kill,
    ProcessExitAck,
    ProcessExited,
    ProcessForked,
    Quit,
    Reporter,
    Spawn,
)
from unicrond.events.vocabulary import (
    Command,
    CommandApplied,
    CommandFailed,
    Decision,
    Member,
    MembershipDecided,
    MembershipPart,
    Observation,
    SeatRun,
    StartWorker,
    StepCommitted,
    StopWorker,
    StoreAddress,
    TaskSpec,
    WorkerObservation,
    WorkerReady,
)
from unicrond.events.vocabulary.placements import runs_of
from unicrond.events.vocabulary.shape import Shape

NODE = "n1"
STORE = StoreAddress(host="127.0.0.1", port=4000)
CONFIG = AgentConfig(
    node=NODE,
    address="127.0.0.1",
    slots=2,
    version="1",
    agent_boot=1,
    agent_socket="/run/a.sock",
    logs="/run/logs",
    domain="rack7",
)


def start(worker: str, number: int, *, term: int = 1, epoch: int = 1) -> StartWorker:
    task = worker.rpartition(".")[0]
    return StartWorker(
        command_id=f"{term}.{epoch}.{NODE}.{number}",
        node=NODE,
        epoch=epoch,
        spec=TaskSpec(name=task),
        worker=worker,
        replica=0,
        shard=0,
        store=STORE,
    )


def stop(worker: str, number: int, *, term: int = 1, epoch: int = 1) -> StopWorker:
    task = worker.rpartition(".")[0]
    command_id = f"{term}.{epoch}.{NODE}.{number}"
    return StopWorker(command_id=command_id, node=NODE, epoch=epoch, task=task, worker=worker, reason="test")


def membership(task: str, generation: int, workers: list[str], *, urgent: bool = False) -> MembershipDecided:
    """One without anything special."""
    return replace(decision(task, generation, workers), urgent=urgent, handover=False, stop="", mtbf_us=0)


def seats(workers: list[str], joiners: list[str], first: int = 0) -> tuple[SeatRun, ...]:
    """One replica each, on this node, from replica `first` on."""
    members = [Member(worker=w, node=NODE, replica=first + i, shard=0) for i, w in enumerate(workers)]
    return runs_of(members, joiners, 1)


def part(task: str, generation: int, number: int, workers: list[str]) -> MembershipPart:
    return MembershipPart(task=task, generation=generation, part=number, seats=seats(workers, []))


def decision(
    task: str,
    generation: int,
    workers: list[str],
    *,
    joiners: list[str] | None = None,
    parts: int = 0,
    leader_confirms: bool = False,
) -> MembershipDecided:
    """A membership, with this node's workers as its members."""
    return MembershipDecided(
        task=task,
        generation=generation,
        size=1,
        seats=seats(workers, joiners or []),
        parts=parts,
        peers=(),
        mtbf_us=9,
        storage_iteration=4,
        handover=True,
        stop="enough",
        leader_confirms=leader_confirms,
        urgent=True,
        store=STORE,
        incident="",
        reason="test",
    )


def committed(generation: int, iteration: int, *, loss: float = 1.0, samples: int = 8) -> IterationCommitted:
    return IterationCommitted(
        generation=generation,
        iteration=iteration,
        samples=samples,
        samples_digest=iteration,
        loss=loss,
        duration_us=10,
        micro_batches_by_rank=(4, 4),
        micro_batches_repeated=0,
    )


def reporter(worker: str) -> Reporter:
    """The fields by which an event of this worker names it."""
    return Reporter(node=NODE, task=worker.rpartition(".")[0], worker=worker)


@dataclass
class Process:
    """A worker as the model sees it."""

    pid: int
    slot: int
    connected: bool = False
    generation: int = 0
    quit: bool = False
    iteration: int = 0


@dataclass
class Node:
    """`feed` gives the core an input and applies what it asks for. `fork_at_once`: a Spawn is answered at once."""

    config: AgentConfig = CONFIG
    state: AgentState = field(init=False)
    fork_at_once: bool = True
    has_fork_server: bool = False
    port: int = 4000
    log: str = "first"
    processes: dict[str, Process] = field(default_factory=dict)
    unforked: list[Spawn] = field(default_factory=list)
    exits: dict[str, ProcessExited] = field(default_factory=dict)
    timers: dict[tuple[str, str], float] = field(default_factory=dict)
    appended: list[Observation] = field(default_factory=list)
    unconfirmed: list[Observation] = field(default_factory=list)
    spawned: list[str] = field(default_factory=list)
    #: How often the log holds each (task, generation, iteration).
    committed: dict[tuple[str, int, int], int] = field(default_factory=dict)
    finished: bool = False
    #: The machine's monotonic clock; a worker says something every ten seconds.
    now_us: int = 0
    next_pid: int = 100

    def __post_init__(self) -> None:
        self.state = core.resume(self.config, Remembered())

    # --- the way in ------------------------------------------------------------------------------

    def feed(self, given: Input) -> list[Action]:
        before = msgspec.msgpack.encode(self.state.memory)
        old = self.state
        self.state, actions = core.handle(old, given)
        assert msgspec.msgpack.encode(old.memory) == before, "the core changed a state that it was given"
        assert core.handle(old, given) == (self.state, actions), "the core is not a function of its arguments"
        for action in actions:
            self.apply(action)
        self.check()
        return actions

    def boot(self, *, port: int = 4000) -> None:
        """The log can be reached, the fork server is there and says what it holds."""
        if not self.state.log_seen:
            self.feed(LogSeen(created=self.log))
        self.has_fork_server = True
        self.port = port
        for exited in list(self.exits.values()):
            self.feed(ForkServerSaid(message=exited))
        self.feed(ForkServerSaid(message=self.inventory()))

    def inventory(self) -> Inventory:
        workers = [
            InventoryWorker(worker=w, task=w.rpartition(".")[0], pid=p.pid, slot=p.slot)
            for w, p in self.processes.items()
        ]
        return Inventory(store_port=self.port, workers=tuple(workers), degrees=Shape._fields)

    def command(self, command: Command, term: int = 1, age_s: float = 0.0) -> list[Action]:
        return self.feed(Commanded(command=command, term=term, cause=f"c-{command.command_id}", age_s=age_s))

    def tell(self, event: Decision, term: int = 1, warrant: str = "", seq: int = 0) -> list[Action]:
        """A decision of the log that is told once."""
        return self.feed(LogDecision(event=event, term=term, warrant=warrant, seq=seq))

    def hello(self, worker: str, *, ready: bool = False) -> list[Action]:
        process = self.processes[worker]
        process.connected = True
        hello = Hello(
            worker=worker,
            task=worker.rpartition(".")[0],
            pid=process.pid,
            generation=process.generation,
            ready=ready or process.generation > 0,
        )
        return self.feed(WorkerConnected(hello=hello))

    def say(self, worker: str, message: FromWorker) -> list[Action]:
        """An event is about the worker that sends it, whichever it was made for."""
        if isinstance(message, WorkerObservation):
            message = replace(message, **reporter(worker))
        self.now_us += 10_000_000
        return self.feed(WorkerSaid(worker=worker, message=message, now_us=self.now_us))

    def ready(self, worker: str) -> None:
        self.hello(worker)
        self.say(worker, WorkerReady(**reporter(worker)))

    def fork(self) -> None:
        """Answer the oldest Spawn."""
        spawn = self.unforked.pop(0)
        worker = spawn.launch.worker
        self.next_pid += 1
        self.processes[worker] = Process(pid=self.next_pid, slot=spawn.slot)
        self.feed(ForkServerSaid(message=ProcessForked(worker=worker, pid=self.next_pid)))

    def die(self, worker: str, status: int, log_tail: str = "boom", mark: Mark | None = None) -> list[Action]:
        process = self.processes.pop(worker)
        exited = ProcessExited(worker=worker, pid=process.pid, status=status)
        self.exits[worker] = exited
        return self.feed(ForkServerSaid(message=exited, log_tail=log_tail, mark=mark))

    def kill_fork_server(self) -> None:
        self.has_fork_server = False
        self.processes.clear()
        self.unforked.clear()
        self.exits.clear()
        self.feed(ForkServerDied())

    def confirm(self) -> None:
        """The log holds everything that was appended."""
        events, self.unconfirmed = self.unconfirmed, []
        for event in events:
            if isinstance(event, StepCommitted):
                self.note_commits(event)
            self.feed(Appended(event=event))

    def fire(self, name: str, key: str = "") -> list[Action]:
        del self.timers[name, key]
        return self.feed(TimerFired(name=name, key=key))  # type: ignore[arg-type]

    def restart_agent(self) -> None:
        """SIGKILL of the agent: only what was remembered is left; unconfirmed observations are lost with it."""
        memory = msgspec.msgpack.decode(msgspec.msgpack.encode(self.state.memory), type=Remembered)
        config = msgspec.structs.replace(self.config, agent_boot=self.config.agent_boot + 1)
        self.config = config
        self.state = core.resume(config, memory)
        self.timers.clear()
        self.unconfirmed.clear()
        for process in self.processes.values():
            process.connected = False

    # --- the way out -----------------------------------------------------------------------------

    def apply(self, action: Action) -> None:
        match action:
            case Append(event=event, confirm=confirm):
                self.appended.append(event)
                if confirm:
                    self.unconfirmed.append(event)
            case TellForkServer(message=Spawn() as spawn):
                assert self.has_fork_server, "a Spawn without a fork server"
                worker = spawn.launch.worker
                assert worker not in self.processes, f"{worker} is spawned while it lives"
                assert worker not in self.exits, f"{worker} is spawned though it has ended"
                self.spawned.append(worker)
                self.unforked.append(spawn)
                taken = [p.slot for p in self.processes.values()] + [s.slot for s in self.unforked]
                assert len(taken) == len(set(taken)), "a slot is given twice"
                assert all(slot < self.config.slots for slot in taken)
            case TellForkServer(message=Kill(worker=worker, signal=number)):
                if number in (signal.SIGTERM, signal.SIGKILL) and worker in self.processes:
                    self.processes[worker].quit = True
            case TellForkServer(message=ProcessExitAck(worker=worker)):
                self.exits.pop(worker, None)
            case TellWorker(worker=worker, message=GroupMembership(generation=generation)):
                process = self.processes[worker]
                assert process.connected
                assert generation > process.generation, "a generation goes back, or comes twice"
                process.generation = generation
            case TellWorker(worker=worker, message=Quit()):
                self.processes[worker].quit = True
            case ArmTimer(name=name, key=key, after_s=after_s):
                assert after_s > 0
                self.timers[name, key] = after_s
            case Finish():
                assert not self.state.memory.workers
                self.finished = True

    def note_commits(self, event: StepCommitted) -> None:
        for iteration in range(event.first, event.last + 1):
            place = (event.task, event.generation, iteration)
            self.committed[place] = self.committed.get(place, 0) + 1

    def check(self) -> None:
        slots = [worker.slot for worker in self.state.memory.workers.values()]
        assert len(slots) == len(set(slots)) <= self.config.slots
        waiting = {w.command.worker for w in self.state.memory.waiting_starts}
        assert not waiting & self.state.memory.workers.keys()
        assert not self.state.memory.ended_workers.keys() & self.state.memory.workers.keys()

    # --- looking ---------------------------------------------------------------------------------

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.appended if isinstance(event, kind)]

    def answers(self, command_id: str) -> list[str]:
        """How a command was answered, each time: "" or the reason of failure."""
        found = [e for e in self.appended if isinstance(e, CommandApplied | CommandFailed)]
        return [e.reason if isinstance(e, CommandFailed) else "" for e in found if e.command_id == command_id]
