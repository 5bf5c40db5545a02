"""Chains of ordered faults in one training: each cell of the kill matrix is one fault, healed and refilled.

Rules
-----
* A fault is ordered for a *generation* (`agents/protocol/injection.py`), so nothing depends on how fast anybody is: it
  happens at the first such point after that membership was taken. The generations follow from the cells alone, and
  every worker is born with its order; those of later cells wait, ready, until they are told to join.
* The test plays agent, supervisor and coordinator: it kills what hangs, kills the rest of a lost replica, and tells
  the memberships.
* The workers run `traced_gpt.py`, which writes down every micro-batch computed and every step's digest. Where the
  sum is fixed the digests must be those of a failure-free run with another number of replicas, at every iteration of
  the chain.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from msgspec.structs import replace

from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.events.vocabulary import TaskSpec, WorkerJoinedGroup, WorkerReady

SCRIPT = Path(__file__).with_name("traced_gpt.py")
ACTIONS = ("kill", "stop", "raise")
#: Points of an iteration, and those of a regroup, a transfer of state, a checkpoint.
WITHIN = (
    "micro_batch=0", "micro_batch=1", "forward", "backward", "partly", "computed", "reducing", "reduced", "agreeing",
    "agreed", "committed",
)  # fmt: skip
REGROUPING = ("forming", "formed", "exchanged")
POINTS = (*WITHIN, *REGROUPING, "giving", "saving")
#: With sharded optimizer state there are others besides.
SHARED_POINTS = ("stepped", "gathering", "dividing")
VICTIMS = ("first", "last")
#: At least so many steps must follow the last fault (and one more, with whose beginning the last may be told).
STEPS_AFTER = 20


@dataclass(frozen=True)
class Cell:
    """One fault. `victim`: a rank of the first replica or of the last (of the joining one, while state is given)."""

    action: str
    point: str
    victim: str

    def order(self, generation: int) -> str:
        where = self.point if "=" in self.point else f"at={self.point}"
        return f"{self.action}@generation={generation},{where}"


@dataclass
class Stage:
    """A cell with its generation, and who is who. `bystander`: lost beforehand, to make the others regroup. `refill`:
    who joins afterwards."""

    cell: Cell
    generation: int
    members: list[int]
    victim: int
    bystander: int | None = None
    joiner: int | None = None
    refill: list[int] = field(default_factory=list)


@dataclass
class Chain:
    """The plan of one run: replicas are numbers, in the order of their birth. `one_by_one`: nobody is lost while others
    regroup after a loss."""

    cells: Sequence[Cell]
    size: int
    one_by_one: bool = False
    stages: list[Stage] = field(default_factory=list)
    born: int = 0

    def __post_init__(self) -> None:
        number = itertools.count()
        members, generation = [next(number) for _ in range(self.size)], 1
        for cell in self.cells:
            stage = Stage(cell, generation, list(members), members[0 if cell.victim == "first" else -1])
            if cell.point == "saving":
                stage.victim = members[0]  # the lead's replica writes
            elif cell.point in (*REGROUPING, "giving", "dividing"):
                alone = self.size == 2 or self.one_by_one
                if not alone:
                    stage.bystander = members[1]
                    members.remove(members[1])
                    generation += 1
                if cell.point == "giving" or alone:
                    stage.joiner = next(number)
                    members.append(stage.joiner)
                    generation += 1
                stage.generation, stage.members = generation, list(members)
                if cell.point == "giving" and cell.victim == "last":
                    stage.victim = members[-1]
            members.remove(stage.victim)
            generation += 1
            stage.refill = [next(number) for _ in range(self.size - len(members))]
            members += stage.refill
            generation += 1
            self.stages.append(stage)
        self.born = next(number)

    def seats(self) -> dict[int, int]:
        """A seat for each replica; members at the same time have different ones, lowest first."""
        seats: dict[int, int] = {}

        def sit(replicas: Sequence[int], present: Sequence[int]) -> None:
            for replica in replicas:
                taken = {seats[other] for other in present if other in seats}
                seats[replica] = next(seat for seat in itertools.count() if seat not in taken)

        present = list(range(self.size))
        sit(present, present)
        for stage in self.stages:
            present = [replica for replica in present if replica != stage.bystander]
            for joiner in [] if stage.joiner is None else [stage.joiner]:
                present.append(joiner)
                sit([joiner], present)
            present = [replica for replica in present if replica != stage.victim]
            present += stage.refill
            sit(stage.refill, present)
        return seats


class Run:
    """One chain, carried out."""

    def __init__(
        self,
        server: ForkServer,
        directory: Path,
        spec: TaskSpec,
        cells: Sequence[Cell],
        size: int = 0,
        script: Path = SCRIPT,
    ) -> None:
        """`size`: replicas; 0: three, or two where they have shards and the whole optimizer state. `script`: writes
        traces as `traced_gpt.py` does."""
        # Optimizer state that is sharded has two holders of each part: it survives one loss at a time.
        sharded = spec.optimizer.distributed
        size = size or (3 if sharded or spec.replica_workers == 1 else 2)
        self.chain = Chain(cells, size, one_by_one=sharded)
        self.traces = directory / "traces"
        self.traces.mkdir()
        spec = replace(spec, entry=str(script), args=(str(self.traces), *spec.args))
        self.rig = Rig(server, directory, spec)
        self.shards = spec.replica_workers
        self.generation = 0

    def workers(self, replica: int) -> list[str]:
        return [f"t.{replica * self.shards + shard + 1}" for shard in range(self.shards)]

    def rank(self, stage: Stage) -> str:
        return self.workers(stage.victim)[0 if stage.cell.victim == "first" else -1]

    def carry_out(self) -> None:
        """All faults, and STEPS_AFTER steps afterwards."""
        orders = {self.rank(stage): stage.cell.order(stage.generation) for stage in self.chain.stages}
        everybody = [worker for replica in range(self.chain.born) for worker in self.workers(replica)]
        seats = self.chain.seats()
        with self.rig as rig:
            for replica in range(self.chain.born):
                for shard, worker in enumerate(self.workers(replica)):
                    slot = seats[replica] * self.shards + shard
                    rig.start(worker, fault=orders.get(worker, ""), slot=slot)
            rig.until(
                lambda: len({worker for worker, said in rig.said if isinstance(said, WorkerReady)}) == len(everybody)
            )
            members = list(range(self.chain.size))
            self.tell(members, joiners=members)
            for stage in self.chain.stages:
                members = self.heal(stage)
            rig.until(lambda: self.refilled_at() and rig.reached(self.refilled_at() + STEPS_AFTER + 1))
            rig.quit(*rig.living())
            rig.until(lambda: not rig.living())

    def refilled_at(self) -> int:
        """The first iteration of the newest generation; 0 as long as there is none."""
        return min((said.iteration for said in self.rig.committed if said.generation == self.generation), default=0)

    def heal(self, stage: Stage) -> list[int]:
        """One cell: the fault, the new membership, the refill. The members at its end."""
        rig, members = self.rig, list(stage.members)
        if stage.bystander is not None:
            self.settle()
            self.kill(stage.bystander)
            present = [replica for replica in members if replica != stage.joiner]
            self.tell(present, urgent=True)
        if stage.joiner is not None:
            self.settle()
            self.tell(members, joiners=[stage.joiner])
        assert self.generation == stage.generation
        victim = self.rank(stage)
        if stage.cell.action == "stop":
            rig.until(lambda: psutil.Process(rig.pids[victim]).status() == psutil.STATUS_STOPPED)
            rig.signal(victim, signal.SIGKILL)  # what a supervisor does to a process that hangs
        rig.until(lambda: victim in rig.exits)
        self.kill(stage.victim)
        members.remove(stage.victim)
        self.tell(members, joiners=[stage.joiner] if stage.joiner in members else [], urgent=True)
        self.settle()
        members += stage.refill
        self.tell(members, joiners=stage.refill)
        return members

    def kill(self, replica: int) -> None:
        """Every rank of it that is left."""
        for worker in self.workers(replica):
            if worker not in self.rig.exits:
                self.rig.signal(worker, signal.SIGKILL)
        self.rig.until(lambda: all(worker in self.rig.exits for worker in self.workers(replica)))

    def tell(self, replicas: Sequence[int], *, joiners: Sequence[int] = (), urgent: bool = False) -> None:
        self.generation += 1
        self.members = [worker for replica in replicas for worker in self.workers(replica)]
        joining = [worker for replica in joiners for worker in self.workers(replica)]
        self.rig.tell(self.generation, self.members, joiners=joining, urgent=urgent)

    def settle(self) -> None:
        """Until all members are in the newest group."""
        rig = self.rig
        rig.until(
            lambda: all(
                any(
                    isinstance(said, WorkerJoinedGroup) and said.generation == self.generation
                    for said in rig.of(WorkerJoinedGroup, w)
                )
                for w in self.members
            )
        )

    # --- what is looked at afterwards -----------------------------------------------------------

    def trace(self, worker: str) -> list[list[str]]:
        """Its lines; the last one may have been cut off with it."""
        path = self.traces / f"{worker}.trace"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def digests(self, shard: int) -> dict[int, set[str]]:
        """Per iteration, the digests of the parameters after it, of all workers that hold that shard."""
        found: dict[int, set[str]] = defaultdict(set)
        for replica in range(self.chain.born):
            for line in self.trace(self.workers(replica)[shard]):
                if line[0] == "stepped" and len(line) == 6:
                    found[int(line[1])].add(line[2])
        return found

    def _thrown_away(self, worker: str) -> Counter[tuple[int, int]]:
        """(iteration, micro-batch) that it has computed ahead, for nothing."""
        log = (self.rig.directory / f"{worker}.log").read_text()
        told = re.findall(r"iteration (\d+): thrown away, for they were computed ahead: ([\d and]+)\n", log)
        return Counter((int(iteration), int(each)) for iteration, lost in told for each in lost.split(" and "))

    def check_work(self, micro_batches: int) -> None:
        """No worker has computed anything twice, and what those who stepped have computed of an iteration is at most
        all of it, once.

        Of two replicas the one may die before the other, a joiner, has received its last byte. Then, and only then,
        the task goes back to a checkpoint, says so, and does compute an iteration again. What a worker has computed
        ahead of a running sum that never came it says, and computes again, or another does.
        """
        rolled_back = any(
            isinstance(said, WorkerJoinedGroup) and said.source == "checkpoint"
            for said in self.rig.of(WorkerJoinedGroup)
        )
        assert not (rolled_back and self.chain.size > 2), "there was a replica left"
        by_iteration: dict[int, Counter[int]] = defaultdict(Counter)
        for replica in range(self.chain.born):
            lines = self.trace(self.workers(replica)[0])
            stepped = {int(line[1]) for line in lines if line[0] == "stepped"}
            computed = Counter((int(line[1]), int(line[2])) for line in lines if line[0] == "computed")
            computed -= self._thrown_away(self.workers(replica)[0])
            assert max(computed.values(), default=1) == 1, f"replica {replica} computed {computed.most_common(3)}"
            for iteration, micro_batch in computed:
                if iteration in stepped:
                    by_iteration[iteration][micro_batch] += 1
        for iteration, count in by_iteration.items():
            once = max(count.values()) == 1
            assert once or rolled_back, f"iteration {iteration}: {count.most_common(3)} by those who stepped"
            assert set(count) <= set(range(micro_batches))
