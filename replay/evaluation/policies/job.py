"""A job as job-by-job systems see it: it runs, stops, is noticed, and starts again on nodes of its own.

    RUNNING --fault--> DETECTION --noticed--> (nodes?) --yes--> TRANSITION --> RUNNING
                                                 |no                 |fault: DETECTION again
                                                IDLE --nodes come--> TRANSITION

Rules
-----
* A fault while the job does not run changes nothing, since it is down already; in DETECTION it may lengthen the
  restart.
* Which nodes a job starts on is its system's choice (`pick_nodes`), made when it is noticed and when nodes come.
* Each node belongs to one job; systems of this kind never move one from job to job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unicrond.replay.evaluation.model.meter import CostPhase
from unicrond.replay.evaluation.model.speeds import Speeds
from unicrond.replay.evaluation.model.virtual_time import Timer, to_us
from unicrond.replay.evaluation.model.world import EvaluationWorld


class System(Protocol):
    """What a job asks of the system that runs it."""

    def pick_nodes(self, job: TrainingJob) -> Sequence[int] | None:
        """Return the nodes to start on now; None: wait."""

    def rate(self, job: TrainingJob, nodes: Sequence[int]) -> int:
        """Return the job's weighted FLOP/s on these nodes in its present form; 0: it cannot run on them."""

    def on_start(self, job: TrainingJob) -> None:
        """Handle that the job has just begun to train."""


class TrainingJob:
    """A job that a system runs. `home`: the nodes that are the job's, up or not. `nodes`: those it runs on or starts
    on. `candidates`: those that were up when `nodes` was picked."""

    def __init__(self, world: EvaluationWorld, system: System, task: str, home: Sequence[int]) -> None:
        self.world = world
        self.task = task
        self.home = list(home)
        self.nodes: list[int] = []
        self.candidates: frozenset[int] = frozenset()
        self._system = system
        self._timer: Timer | None = None
        self._restart_s = 0.0

    @property
    def phase(self) -> CostPhase:
        """Look up the phase that the job is in."""
        return self.world.meter.phase(self.task)

    def nodes_up(self) -> list[int]:
        """Return the job's own nodes that are up."""
        return [node for node in self.home if self.world.up(node)]

    def run(self, nodes: Sequence[int]) -> None:
        """Train on these nodes from now on."""
        self.nodes = list(nodes)
        self._timer = None
        self.world.meter.run(self.task, self._system.rate(self, nodes), nodes)

    def hit(self, detection_s: float, restart_s: float) -> None:
        """Apply a fault: unnoticed for `detection_s`, and then `restart_s` from having nodes to training."""
        if self.phase in (CostPhase.RUNNING, CostPhase.TRANSITION):
            self._enter(CostPhase.DETECTION, detection_s)
            self._restart_s = restart_s
        elif self.phase is CostPhase.DETECTION:
            self._restart_s = max(restart_s, self._restart_s)

    def pause(self, restart_s: float) -> None:
        """Restart a running job as planned, on the nodes that are up then."""
        if self.phase is CostPhase.RUNNING:
            self._restart_s = restart_s
            self.try_to_start()

    def try_to_start(self) -> None:
        """Start if there are nodes to start on, else wait for them."""
        self.candidates = frozenset(self.nodes_up())
        nodes = self._system.pick_nodes(self)
        if not nodes or not self._system.rate(self, nodes):
            self.nodes = []
            self.world.meter.idle(self.task)
            return
        self.nodes = list(nodes)
        self._enter(CostPhase.TRANSITION, self._restart_s)

    def _enter(self, phase: CostPhase, length_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.world.meter.stall(self.task, phase)
        self._timer = self.world.clock.after(to_us(length_s), self._next)

    def _next(self) -> None:
        self._timer = None
        if self.phase is CostPhase.DETECTION:
            self.try_to_start()
        else:
            self.run(self.nodes)
            self._system.on_start(self)


class JobByJob:
    """The common part of systems that have the best plan at the start, and then treat every job for itself.

    A system says how long a fault goes unnoticed (`detection_s`), how long a restart takes (`restart_s`), on which
    nodes (`pick_nodes`), how fast it is there (`rate`), and what a repaired node is good for (`node_back`). `speeds`:
    the system's own where they are not Megatron's.
    """

    def __init__(self, world: EvaluationWorld, spare_nodes: int = 0, speeds: Speeds | None = None) -> None:
        self.world = world
        self.assumptions = world.assumptions
        self.worth = world.workload.worth_at(speeds or world.workload.speeds)
        nodes = world.workload.cluster.nodes - spare_nodes
        self.spares = list(range(nodes, nodes + spare_nodes))
        self.jobs: list[TrainingJob] = []
        self._owner: dict[int, TrainingJob] = {}
        first = 0
        for task, count in world.workload.best_plan(nodes, speeds).items():
            job = TrainingJob(world, self, task, range(first, first + count))
            self.jobs.append(job)
            self._owner |= dict.fromkeys(job.home, job)
            first += count

    def start(self) -> None:
        """Run all jobs at once."""
        for job in self.jobs:
            job.candidates = frozenset(job.home)
            nodes = self.pick_nodes(job)
            if nodes and self.rate(job, nodes):
                job.run(nodes)

    def owner(self, node: int) -> TrainingJob | None:
        """Return the job whose node it is, None without one."""
        return self._owner.get(node)

    def replace_node(self, job: TrainingJob, node: int, instead_of: int) -> None:
        """Put `node` into the place of the job's node `instead_of`, which the job gives up."""
        job.home[job.home.index(instead_of)] = node
        del self._owner[instead_of]
        self._owner[node] = job

    def add_node(self, job: TrainingJob, node: int) -> None:
        """Give a node without a job to this job from now on."""
        job.home.append(node)
        self._owner[node] = job

    def unowned(self) -> list[int]:
        """List the nodes that are up and neither a job's nor spares."""
        nodes = range(self.world.workload.cluster.nodes - len(self.spares))
        return [node for node in nodes if node not in self._owner and self.world.up(node)]

    def node_lost(self, node: int) -> None:
        """Stop the job of a node that dies."""
        job = self.owner(node)
        if job is not None and node in job.nodes:
            job.hit(self.detection_s(), self.restart_s(job, node, 1))

    def fault(self, node: int, severity: int) -> None:
        """Stop the job on a node whose process or connection fails."""
        job = self.owner(node)
        if job is not None and node in job.nodes:
            job.hit(self.detection_s(), self.restart_s(job, node, severity))

    def node_back(self, node: int) -> None:
        """Give a repaired node to its job, if that waits for nodes."""
        job = self.owner(node)
        if job is not None and job.phase is CostPhase.IDLE:
            job.try_to_start()

    def detection_s(self) -> float:
        """Return how long a fault goes unnoticed, seconds."""
        raise NotImplementedError

    def restart_s(self, job: TrainingJob, node: int, severity: int) -> float:
        """Return how long a restart after this fault takes, seconds."""
        raise NotImplementedError

    def pick_nodes(self, job: TrainingJob) -> Sequence[int] | None:
        """Return all the job's nodes that are up."""
        return job.nodes_up()

    def rate(self, job: TrainingJob, nodes: Sequence[int]) -> int:
        """Return F(t, nodes)."""
        values = self.worth[job.task]
        return values[min(len(nodes), len(values) - 1)]

    def on_start(self, job: TrainingJob) -> None:
        """Do nothing: systems that have more to do override this."""


class Elastic(JobByJob):
    """A system whose jobs go on with the nodes that are left, and restart to use one that comes back."""

    def join_s(self) -> float:
        """Return how long the restart with a repaired node takes, seconds."""
        raise NotImplementedError

    def node_back(self, node: int) -> None:
        """Let the node join its job, now or as soon as the job trains again."""
        super().node_back(node)
        job = self.owner(node)
        if job is not None:
            self.on_start(job)

    def on_start(self, job: TrainingJob) -> None:
        """Restart with the nodes that have come since the nodes were picked."""
        if not job.candidates.issuperset(job.nodes_up()):
            job.pause(self.join_s())
