"""A job as job-by-job systems see it: it runs, stops, is noticed, and starts again on nodes of its own.

    RUNNING --fault--> DETECTION --noticed--> (nodes?) --yes--> TRANSITION --> RUNNING
                                                 |no                 |fault: DETECTION again
                                                IDLE --nodes come--> TRANSITION

Rules
-----
* A fault while nothing runs adds nothing, the job is down already; in DETECTION it may make the restart longer.
* Which nodes a job starts on is its system's choice (`seats`), made when it is noticed and when nodes come.
* Nodes are a job's own; systems of this kind never take them from one job for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from replay.evaluation.meter import Phase
from replay.evaluation.speeds import Speeds
from replay.evaluation.virtual_time import Timer, to_us
from replay.evaluation.world import World


class System(Protocol):
    """What a job asks of the system that runs it."""

    def seats(self, job: Job) -> Sequence[int] | None:
        """The nodes to start on now, None: wait."""

    def rate(self, job: Job, nodes: Sequence[int]) -> int:
        """Weighted FLOP/s of the job on these nodes in its present form; 0: it cannot run on them."""

    def started(self, job: Job) -> None:
        """The job has just begun to train."""


class Job:
    """`home`: the nodes that are the job's, there or not. `nodes`: those it runs on or starts on. `seen`: those that
    were there when these were chosen.
    """

    def __init__(self, world: World, system: System, task: str, home: Sequence[int]) -> None:
        self.world = world
        self.task = task
        self.home = list(home)
        self.nodes: list[int] = []
        self.seen: frozenset[int] = frozenset()
        self._system = system
        self._timer: Timer | None = None
        self._restart_s = 0.0

    @property
    def phase(self) -> Phase:
        """What it is doing."""
        return self.world.meter.phase(self.task)

    def there(self) -> list[int]:
        """Its own nodes that are there."""
        return [node for node in self.home if self.world.up(node)]

    def run(self, nodes: Sequence[int]) -> None:
        """Train on these nodes from now on."""
        self.nodes = list(nodes)
        self._timer = None
        self.world.meter.run(self.task, self._system.rate(self, nodes), nodes)

    def hit(self, detection_s: float, restart_s: float) -> None:
        """A fault: unnoticed for `detection_s`, and then `restart_s` from having nodes to training."""
        if self.phase in (Phase.RUNNING, Phase.TRANSITION):
            self._enter(Phase.DETECTION, detection_s)
            self._restart_s = restart_s
        elif self.phase is Phase.DETECTION:
            self._restart_s = max(restart_s, self._restart_s)

    def pause(self, restart_s: float) -> None:
        """A planned restart of a running job, on the nodes that there are then."""
        if self.phase is Phase.RUNNING:
            self._restart_s = restart_s
            self.try_to_start()

    def try_to_start(self) -> None:
        """Start if there are nodes to start on, else wait for them."""
        self.seen = frozenset(self.there())
        nodes = self._system.seats(self)
        if not nodes or not self._system.rate(self, nodes):
            self.nodes = []
            self.world.meter.idle(self.task)
            return
        self.nodes = list(nodes)
        self._enter(Phase.TRANSITION, self._restart_s)

    def _enter(self, phase: Phase, length_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.world.meter.stall(self.task, phase)
        self._timer = self.world.clock.after(to_us(length_s), self._next)

    def _next(self) -> None:
        self._timer = None
        if self.phase is Phase.DETECTION:
            self.try_to_start()
        else:
            self.run(self.nodes)
            self._system.started(self)


class JobByJob:
    """What these systems share: the best plan at the start, then every job for itself.

    A system says how long a fault goes unnoticed (`detection_s`), how long a restart takes (`restart_s`), on
    which nodes (`seats`), how fast it is there (`rate`), and what a repaired node is good for (`node_back`).
    `speeds`: the system's own where they are not Megatron's.
    """

    def __init__(self, world: World, spare_nodes: int = 0, speeds: Speeds | None = None) -> None:
        self.world = world
        self.assumed = world.assumptions
        self.worth = world.workload.worth_at(speeds or world.workload.speeds)
        nodes = world.workload.cluster.nodes - spare_nodes
        self.spares = list(range(nodes, nodes + spare_nodes))
        self.jobs: list[Job] = []
        self._owner: dict[int, Job] = {}
        first = 0
        for task, count in world.workload.best_plan(nodes, speeds).items():
            job = Job(world, self, task, range(first, first + count))
            self.jobs.append(job)
            self._owner |= dict.fromkeys(job.home, job)
            first += count

    def start(self) -> None:
        """Everything runs at once."""
        for job in self.jobs:
            job.seen = frozenset(job.home)
            nodes = self.seats(job)
            if nodes and self.rate(job, nodes):
                job.run(nodes)

    def owner(self, node: int) -> Job | None:
        """The job whose node it is."""
        return self._owner.get(node)

    def give(self, job: Job, node: int, instead_of: int) -> None:
        """The job gives up its node `instead_of`; `node` takes its place."""
        job.home[job.home.index(instead_of)] = node
        del self._owner[instead_of]
        self._owner[node] = job

    def take(self, job: Job, node: int) -> None:
        """A node without a job is this job's from now on."""
        job.home.append(node)
        self._owner[node] = job

    def unowned(self) -> list[int]:
        """Nodes that are there and no job's, nor spares."""
        nodes = range(self.world.workload.cluster.nodes - len(self.spares))
        return [node for node in nodes if node not in self._owner and self.world.up(node)]

    def node_lost(self, node: int) -> None:
        """A node dies; its job stops."""
        job = self.owner(node)
        if job is not None and node in job.nodes:
            job.hit(self.detection_s(), self.restart_s(job, node, 1))

    def fault(self, node: int, severity: int) -> None:
        """A process or a connection fails; its job stops."""
        job = self.owner(node)
        if job is not None and node in job.nodes:
            job.hit(self.detection_s(), self.restart_s(job, node, severity))

    def node_back(self, node: int) -> None:
        """A repaired node goes to its job, if that waits for nodes."""
        job = self.owner(node)
        if job is not None and job.phase is Phase.IDLE:
            job.try_to_start()

    def detection_s(self) -> float:
        """How long a fault goes unnoticed."""
        raise NotImplementedError

    def restart_s(self, job: Job, node: int, severity: int) -> float:
        """How long a restart after this fault takes."""
        raise NotImplementedError

    def seats(self, job: Job) -> Sequence[int] | None:
        """All the job's nodes that are there."""
        return job.there()

    def rate(self, job: Job, nodes: Sequence[int]) -> int:
        """F(t, nodes)."""
        values = self.worth[job.task]
        return values[min(len(nodes), len(values) - 1)]

    def started(self, job: Job) -> None:
        """Nothing more to do."""


class Elastic(JobByJob):
    """A system whose jobs go on with the nodes that are left, and restart to use one that comes back."""

    def join_s(self) -> float:
        """How long the restart with a repaired node takes."""
        raise NotImplementedError

    def node_back(self, node: int) -> None:
        """The node joins its job, now or as soon as the job trains again."""
        super().node_back(node)
        job = self.owner(node)
        if job is not None:
            self.started(job)

    def started(self, job: Job) -> None:
        """Nodes that came meanwhile join."""
        if not job.seen.issuperset(job.there()):
            job.pause(self.join_s())
