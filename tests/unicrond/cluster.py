"""A cluster in miniature for the core's tests: the real fold and decide, agents and trainers as a few rules.

Time is a counter, delivery order is drawn from a seed. What an agent or a trainer would say is said here
by hand; the real ones are tested in tests/agents, tests/trainer and tests/integration.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from unicrond.core.decide import decide, needed_solves
from unicrond.core.deciding import memberships
from unicrond.core.fold import fold
from unicrond.core.planning.solver import solve
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.invariants import check
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy, Settings
from unicrond.core.state.state import ClusterState, NodeStatus, TaskStatus
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.placements import joiners_of, members_of, starts
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import SCHEMA, schema_of, told_version

SECOND_US = 1_000_000


class Told(NamedTuple):
    """A membership as nodes hear it."""

    generation: int
    members: tuple[v.Member, ...]
    handover: bool
    stop: str
    peers: tuple[v.MemoryService, ...]
    mtbf_us: int
    joiners: tuple[str, ...]
    leader_confirms: bool


def membership_of(event: v.MembershipDecided) -> Told:
    """What a decision tells; of one in parts the last members alone."""
    members, joiners = members_of(event.task, event.seats, event.size), joiners_of(event.task, event.seats)
    return Told(
        event.generation,
        members,
        event.handover,
        event.stop,
        event.peers,
        event.mtbf_us,
        joiners,
        event.leader_confirms,
    )


@contextmanager
def no_leader_confirms() -> Iterator[None]:
    """Each member tells for itself, as after a group that did not meet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memberships, "_lead_confirms", lambda *_: False)
        yield


@dataclass
class Process:
    """A worker process: the newest membership it was told, the group it is in."""

    worker: str
    task: str
    replica: int
    told: Told | None = None
    generation: int = 0
    parked: bool = False


@dataclass
class Host:
    """A node: its processes, and commands on their way to it."""

    name: str
    slots: int = 1
    up: bool = True
    boot: int = 0
    processes: dict[str, Process] = field(default_factory=dict)
    commands: list[RecordedEvent] = field(default_factory=list)
    #: What its agent reads, and the tasks that it has ever had a worker of.
    reads: int = SCHEMA
    follows: set[str] = field(default_factory=set)
    #: It fails its health checks; None: it never answers.
    ill: bool | None = False
    #: Its agent was told to leave.
    leaving: bool = False
    gpu: str = ""


class MiniCluster:
    """`run()` delivers until nothing moves; faults are methods."""

    def __init__(self, seed: int, policy: Policy | None = None, *, check_s: float = 0.0, repair_s: float = 0.0) -> None:
        """`check_s`, `repair_s`: limits of health checks and repairs; 0: there are none."""
        self.limits_s = (check_s, repair_s)
        #: What the coordinator writes, from its next start on.
        self.schema = SCHEMA
        self.random = random.Random(seed)
        self.policy = policy or Policy()
        self.state = ClusterState()
        self.log: list[RecordedEvent] = []
        self.now_us = 1_000_000_000 * SECOND_US
        self.hosts: dict[str, Host] = {}
        self.iterations: dict[str, int] = {}
        #: Where whoever regroups says that its state came from.
        self.source: v.StateSource = "own"
        #: By worker: the iteration in which it would end now, and how many micro-batches of it it has finished.
        self.computed: dict[str, tuple[int, int]] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._passed: set[str] = set()
        self._members: dict[tuple[str, int], tuple[tuple[v.Member, ...], tuple[str, ...]]] = {}
        self._solutions: dict = {}
        self._based_on = 0
        self.take_over()

    # --- the log -----------------------------------------------------------------------------

    def append(self, event: v.AnyEvent, producer: str, boot: int) -> RecordedEvent:
        self.now_us += 1000
        key = (producer, boot)
        self._numbers[key] = self._numbers.get(key, 0) + 1
        term = self.state.term if producer == "coordinator" else 0
        if isinstance(event, v.CoordinatorStarted):
            term = event.term
        envelope = Envelope(
            producer=producer,
            boot=boot,
            number=self._numbers[key],
            term=term,
            based_on=self._based_on or self.state.seq if producer == "coordinator" else 0,
            observed_at_us=self.now_us,
            event=event,
        )
        entry = RecordedEvent(len(self.log) + 1, self.now_us, envelope)
        self.log.append(entry)
        self.state = fold(self.state, entry)
        check(self.state)
        if isinstance(event, v.Command):
            self.hosts[event.node].commands.append(entry)
        if isinstance(event, v.MembershipDecided) and self._is_in_force(event):
            membership = self.state.tasks[event.task].membership
            self._members[event.task, event.generation] = membership.members, membership.joiners
            for host in self.hosts.values():
                if event.task in host.follows and schema_of(event) <= host.reads:
                    host.commands.append(entry)
        return entry

    def _is_in_force(self, event: v.MembershipDecided) -> bool:
        """Not torn: agents go by the same rule as the fold (tests/agents/test_told_once.py)."""
        return self.state.tasks[event.task].generation == event.generation

    def say(self, host: Host, event: v.AnyEvent) -> None:
        self.append(event, host.name, host.boot)

    def take_over(self) -> None:
        """A coordinator crash and restart."""
        term = self.state.term + 1
        policy = Settings(self.policy, 1.0, *self.limits_s).numbers()
        self.append(
            v.CoordinatorStarted(term=term, version=told_version("test", self.schema), policy=policy),
            "coordinator",
            term,
        )
        self._passed.clear()
        self._solutions.clear()

    # --- people ------------------------------------------------------------------------------

    def add_host(
        self,
        name: str,
        slots: int = 1,
        memory: v.MemoryService | None = None,
        users: tuple[str, ...] = (),
        gpu: str = "",
        domain: str = "",
        object_stores: tuple[str, ...] = (),
    ) -> None:
        host = self.hosts.setdefault(name, Host(name, slots))
        host.gpu = gpu or host.gpu
        host.up = True
        host.boot += 1
        running = tuple(
            v.RunningWorker(worker=p.worker, task=p.task, pid=1, generation=p.generation)
            for p in host.processes.values()
        )
        store = v.StoreAddress(host="127.0.0.1", port=1)
        joined = v.NodeJoined(
            node=name,
            address="127.0.0.1",
            slots=host.slots,
            store=store,
            agent_boot=host.boot,
            version=told_version("test", SCHEMA),
            workers=running,
            memory=memory,
            users=users,
            gpu=host.gpu,
            domain=domain,
            object_stores=object_stores,
        )
        self.say(host, joined)

    def submit(self, name: str, **spec: object) -> None:
        wanted = v.TaskSpec(name=name, **({"iterations": 10**6} | spec))  # type: ignore[arg-type]
        if wanted.max_workers > wanted.micro_batches * wanted.replica_workers:  # some would idle, and none may
            wanted = replace(wanted, global_batch=wanted.max_workers * wanted.micro_batch)
        self.append(v.TaskSubmitted(spec=wanted), "api", self.state.term)

    def cordon(self, node: str, *, drain: bool = False) -> None:
        self.append(v.NodeCordoned(node=node, drain=drain, reason="test"), "api", self.state.term)

    def drain_by(self, node: str, after_s: float) -> None:
        """The node is to be empty so long from now."""
        by_us = self.now_us + int(after_s * SECOND_US)
        self.append(v.NodeCordoned(node=node, drain=True, reason="test", empty_by_us=by_us), "api", self.state.term)

    def maintain(self, *nodes: str, after_s: float, for_s: float) -> str:
        """A maintenance window; its id."""
        from_us = self.now_us + int(after_s * SECOND_US)
        until_us = from_us + int(for_s * SECOND_US)
        asked = v.MaintenancePlanned(nodes=nodes, from_us=from_us, until_us=until_us, reason="test")
        return f"w{self.append(asked, 'api', self.state.term).seq}"

    def uncordon(self, node: str) -> None:
        self.append(v.NodeUncordoned(node=node, reason="test"), "api", self.state.term)

    # --- faults ------------------------------------------------------------------------------

    def kill_worker(self, host: Host, worker: str) -> None:
        process = host.processes.pop(worker)
        iteration, computed = self.computed.get(worker, (0, 0))
        exited = v.WorkerExited(
            node=host.name, task=process.task, worker=worker, exit_code=None, signal=9, is_expected=False,
            iteration=iteration, micro_batches_finished=computed,
        )  # fmt: skip
        if host.up:
            self.say(host, exited)

    def report(
        self,
        worker: str,
        kind: str,
        generation: int | None = None,
        iteration: int = 1,
        peer: str = "",
        lost: tuple[str, ...] = (),
    ) -> None:
        """The worker, still alive, reports an error of its present generation (or another)."""
        task = worker.rpartition(".")[0]
        (host,) = [host for host in self.hosts.values() if worker in host.processes]
        error = v.ErrorReported(
            node=host.name,
            task=task,
            worker=worker,
            kind=kind,  # type: ignore[arg-type]
            generation=host.processes[worker].generation if generation is None else generation,
            iteration=iteration,
            phase="reduce",
            message=f"{kind} at {worker}",
            peer=peer,
            lost_peers=lost,
        )
        self.say(host, error)

    def kill_host(self, host: Host) -> None:
        """Agent, fork server and workers are gone; the coordinator notices later (lose)."""
        host.up = False
        host.processes.clear()

    def lose(self, host: Host) -> None:
        lost = v.NodeLost(
            node=host.name, evidence=v.Evidence(beat_seq=1, beat_at_us=self.now_us - SECOND_US), reason="silent"
        )
        self.append(lost, "coordinator", self.state.term)

    # --- what agents and trainers do ---------------------------------------------------------

    def obey_all(self) -> None:
        """Every command that has been sent is carried out."""
        for host in self.hosts.values():
            while host.up and host.commands:
                self._obey(host)

    def _obey(self, host: Host) -> None:
        entry = host.commands.pop(0)
        command = entry.envelope.event
        if isinstance(command, v.StartWorker | v.StartWorkers) and 0 < command.agent_boot < host.boot:
            void = "void: it was for an agent that has ended"
            self.say(host, v.CommandFailed(node=host.name, command_id=command.command_id, reason=void))
        elif isinstance(command, v.StartWorkers):
            for start in starts(command):
                self._start(host, start)
        elif isinstance(command, v.StartWorker):
            self._start(host, command)
        elif isinstance(command, v.StopWorker):
            process = host.processes.pop(command.worker, None)
            if process is not None:
                iteration, computed = self.computed.get(command.worker, (0, 0))
                exited = v.WorkerExited(
                    node=host.name,
                    task=process.task,
                    worker=command.worker,
                    exit_code=0,
                    signal=None,
                    is_expected=True,
                    iteration=iteration,
                    micro_batches_finished=computed,
                )
                self.say(host, exited)
        elif isinstance(command, v.LeaveCluster):
            host.leaving = True
            if command.for_good:
                self.say(host, v.NodeLeaving(node=host.name, grace_us=command.limit_us, reason=command.reason))
            else:
                host.processes.clear()
        elif isinstance(command, v.CheckNode) and host.ill is not None:
            self.checked(host, command, passed=not host.ill)
        elif isinstance(command, v.MembershipDecided):
            told = membership_of(command)
            if command.parts:
                members, joiners = self._members[command.task, command.generation]
                told = told._replace(members=members, joiners=joiners)
            for process in host.processes.values():
                if process.task == command.task and (process.told is None or process.told.generation < told.generation):
                    process.told = told

    def _start(self, host: Host, command: v.StartWorker) -> None:
        host.follows.add(command.spec.name)
        if len(host.processes) >= host.slots:
            self.say(host, v.CommandFailed(node=host.name, command_id=command.command_id, reason="no free slot"))
            return
        task = command.spec.name
        host.processes[command.worker] = Process(command.worker, task, command.replica)
        self.say(host, v.WorkerStarted(node=host.name, task=task, worker=command.worker, pid=1))
        self.say(host, v.WorkerReady(node=host.name, task=task, worker=command.worker))

    def checked(self, host: Host, command: v.CheckNode, *, passed: bool) -> None:
        self.say(
            host,
            v.NodeChecked(
                node=host.name,
                command_id=command.command_id,
                has_passed=passed,
                duration_us=9,
                detail="as the test wants",
            ),
        )

    def group_up(self, task: str) -> bool:
        """The newest membership that a process was told forms, if all its members are there."""
        told = [p.told for h in self.hosts.values() if h.up for p in h.processes.values() if p.task == task and p.told]
        if not told:
            return False
        newest = max(told, key=lambda m: m.generation)
        living = {
            p.worker: (h, p)
            for h in self.hosts.values()
            if h.up
            for p in h.processes.values()
            if p.told is not None and p.told.generation == newest.generation and not p.parked
        }
        if any(member.worker not in living for member in newest.members):
            return False
        fresh = [m.worker for m in newest.members if living[m.worker][1].generation < newest.generation]
        leavers = [
            (h, p)
            for h, p in living.values()
            if p.task == task and p.generation and not p.parked and p.worker not in {m.worker for m in newest.members}
        ]
        if not fresh and not leavers:
            return False
        iteration = self.iterations.setdefault(task, 0)
        for host, process in leavers:
            process.parked = True
            self.say(
                host,
                v.WorkerPaused(
                    node=host.name, task=task, worker=process.worker, generation=newest.generation, iteration=iteration
                ),
            )
        lead = newest.members[0].worker if newest.members else ""
        keeps = newest.leader_confirms and self.source == "own"
        quiet = [name for name in fresh if keeps and name != lead and name not in newest.joiners]
        for name in fresh:
            host, process = living[name]
            process.generation = newest.generation
            if name in quiet:
                continue  # its lead tells for it
            regrouped = v.WorkerJoinedGroup(
                node=host.name,
                task=task,
                worker=name,
                generation=newest.generation,
                iteration=iteration + 1,
                micro_batches_assigned=1,
                duration_us=1000,
                source=self.source,
                micro_batches_assigned_elsewhere=len(quiet) if name == lead else 0,
            )
            self.say(host, regrouped)
        return True

    def train(self, task: str, steps: int = 1) -> None:
        """The group commits, if it is whole."""
        membership = self.state.tasks[task].membership
        if membership is None or not membership.members or not self.state.tasks[task].confirmed:
            return
        lead = membership.members[0]
        host = self.hosts[lead.node]
        if not host.up or lead.worker not in host.processes:
            return
        first = self.iterations.get(task, 0) + 1
        self.iterations[task] = first + steps - 1
        self.say(
            host,
            v.StepCommitted(
                node=lead.node,
                task=task,
                worker=lead.worker,
                generation=membership.generation,
                first=first,
                last=first + steps - 1,
                samples=8 * steps,
                samples_digest=0,
                loss=1.0,
                duration_us=1000 * steps,
                micro_batches_by_rank=(1,),
            ),
        )

    # --- running -----------------------------------------------------------------------------

    def decide(self) -> bool:
        """One call of the real decide; its batch is appended at once."""
        for problem in needed_solves(Survey(self.state, self.policy)):
            self._solutions.setdefault(problem, solve(problem))
        events = decide(Survey(self.state, self.policy), self._solutions)
        self._based_on = self.state.seq
        for event in events:
            self.append(event, "coordinator", self.state.term)
        self._based_on = 0
        return bool(events)

    def pass_deadlines(self, prefix: str = "") -> bool:
        standing = [
            d for d in deadlines(Survey(self.state, self.policy)) if d not in self._passed and d.startswith(prefix)
        ]
        for name in standing:
            self._passed.add(name)
            self.append(v.DeadlineExpired(deadline_id=name), "coordinator", self.state.term)
        return bool(standing)

    def moves(self) -> list:
        """All that could happen next without a fault."""
        moves: list = [lambda h=h: self._obey(h) or True for h in self.hosts.values() if h.up and h.commands]
        moves += [lambda t=t: self.group_up(t) for t in self.state.tasks]
        moves += [lambda h=h: self._leave(h) for h in self.hosts.values() if h.up and h.leaving]
        moves.append(self.decide)
        return moves

    def _leave(self, host: Host) -> bool:
        """The node has been told to, and its last worker is gone."""
        if host.processes:
            return False
        host.up = host.leaving = False
        self.say(host, v.NodeLeft(node=host.name, reason="it was told to"))
        return True

    def standing(self) -> dict[str, int]:
        return deadlines(Survey(self.state, self.policy))

    def run_but_isolation(self) -> None:
        """As `run`, but who is isolated stays so."""
        self.run(passing=("symptom", "exit", "restart"))

    def run(
        self, limit: int = 5000, passing: tuple[str, ...] = ("isolation", "symptom", "exit", "restart", "hold")
    ) -> None:
        """Until nothing moves: agents obey, groups form, decide is quiet; in a drawn order."""
        for _ in range(limit):
            moves = self.moves()
            self.random.shuffle(moves)
            if not any(move() for move in moves):
                if any(self.pass_deadlines(prefix) for prefix in passing):
                    continue
                return
        raise AssertionError(f"no rest after {limit} rounds: {self.story()}")

    def story(self, last: int = 30) -> str:
        return "\n".join(f"{e.seq} {e.envelope.event}" for e in self.log[-last:])

    def assert_whole(self) -> None:
        """At rest: every active task has what the plan gives it, and nothing is left to explain."""
        for task in self.state.tasks.values():
            if task.status is not TaskStatus.ACTIVE:
                assert not [w for w in task.workers.values() if self.state.nodes[w.node].status is NodeStatus.UP]
                continue
            given = self.state.plan.assignments[task.name].workers
            members = len(task.membership.members) if task.membership else 0
            assert members == given, f"{task.name}: {members} members, plan gives {given}\n{self.story()}"
            assert not given or task.confirmed, self.story()
        assert not self.state.incidents, f"{self.state.incidents}\n{self.story()}"


def trained(workers: int, **spec: Any) -> MiniCluster:
    """One task "big" of `workers` workers, each on a node of its own, after three iterations."""
    cluster = MiniCluster(3)
    for number in range(workers):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=workers, **spec)
    cluster.run()
    cluster.train("big", 3)
    cluster.run()
    return cluster


def members(cluster: MiniCluster, task: str = "big") -> list[str]:
    """The workers of the task's membership, by rank."""
    membership = cluster.state.tasks[task].membership
    assert membership is not None
    return [member.worker for member in membership.members]
