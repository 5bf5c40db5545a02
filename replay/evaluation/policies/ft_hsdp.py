"""Fault-tolerant HSDP (Meta, arXiv 2602.00277): a replica drops out, restarts and catches up; the others train on.

A job is D replicas of R nodes, R the fewest on which the task trains, or `ft_hsdp_replica_nodes`; nodes beyond D x R
are its spares, nodes without a job those of any. Any fault takes its whole replica out. The job stands still for
`ft_hsdp_stall_s` (published: 3 minutes, detection included) and goes on with the replicas that are left, its steps
without the lost one's samples. The replica restarts on whole nodes that no other replica uses, and after
`ft_hsdp_restart_s` it trains with the others, without stopping them. With no replica left the job starts from a
checkpoint.

Assumed: a replica restarts in the time that the publication gives for a restart of everything (10 minutes); k of D
replicas are worth k / D of all, and no more than a job that has begun with k. The price of sharding inside a replica
and of an all-reduce driven by the CPU is not computed: the model has neither. So it is as fast as Megatron, but for
spares.
"""

from __future__ import annotations

from collections.abc import Sequence

from unicrond.replay.evaluation.model.meter import CostPhase
from unicrond.replay.evaluation.model.virtual_time import Timer, to_us
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.policies.job import JobByJob, TrainingJob

Replica = tuple[int, ...]


class Replicas:
    """A job's replicas: `training`, in their order, and `restarting` ones with the timer that ends their restart;
    `full_count`: how many there should be."""

    def __init__(self, job: TrainingJob, size: int) -> None:
        self.job = job
        self.size = size
        self.full_count = len(job.home) // size
        self.training: list[Replica] = [
            tuple(job.home[nth * size : (nth + 1) * size]) for nth in range(self.full_count)
        ]
        self.restarting: dict[Replica, Timer] = {}

    @property
    def nodes(self) -> list[int]:
        """List the nodes of the replicas that train."""
        return [node for replica in self.training for node in replica]

    def free(self) -> list[int]:
        """List the job's nodes that are up and in no replica."""
        occupied = set(self.nodes).union(*self.restarting)
        return [node for node in self.job.nodes_up() if node not in occupied]

    def drop(self, node: int) -> bool:
        """Take the node's replica out, and return whether it was training."""
        for replica in [replica for replica in self.restarting if node in replica]:
            self.restarting.pop(replica).cancel()
        hit = [replica for replica in self.training if node in replica]
        self.training = [replica for replica in self.training if node not in replica]
        return bool(hit)


class FtHsdp(JobByJob):
    """Lets replicas leave and join again while the others train. `replicas`: those of each task."""

    def __init__(self, world: EvaluationWorld) -> None:
        super().__init__(world)
        self.replicas: dict[str, Replicas] = {}
        for task, job in zip(world.workload.tasks, self.jobs, strict=True):
            fewest = world.workload.speeds[task.name].least(task.min_nodes)
            size = max(fewest, round(self.assumptions.ft_hsdp_replica_nodes))
            self.replicas[task.name] = Replicas(job, max(1, min(size, len(job.home))))

    def detection_s(self) -> float:
        """Return the part of the published stall that is detection."""
        return min(self.assumptions.elastic_detect_s, self.assumptions.ft_hsdp_stall_s)

    def restart_s(self, job: TrainingJob, node: int, severity: int) -> float:
        """Return the rest of the stall; with a start from a checkpoint when the last replica is lost."""
        rest_s = self.assumptions.ft_hsdp_stall_s - self.detection_s()
        if self.replicas[job.task].training:
            return rest_s
        return rest_s + self.assumptions.checkpoint_load_s + self.assumptions.recompute_s

    def pick_nodes(self, job: TrainingJob) -> Sequence[int] | None:
        """Return the nodes of the replicas that train."""
        return self.replicas[job.task].nodes or None

    def rate(self, job: TrainingJob, nodes: Sequence[int]) -> int:
        """Return these replicas' share of what all achieve together."""
        replicas = self.replicas[job.task]
        whole = replicas.full_count * replicas.size
        in_all, alone = (super(FtHsdp, self).rate(job, range(count)) for count in (whole, len(nodes)))
        return min(in_all * len(nodes) // max(1, whole), alone)

    def node_lost(self, node: int) -> None:
        """Drop the node's replica."""
        self._drop(node, 1)

    def fault(self, node: int, severity: int) -> None:
        """Drop the node's replica; the node can be used again at once."""
        self._drop(node, severity)

    def node_back(self, node: int) -> None:
        """Let the node complete a replica: of its own job, or as a spare of any."""
        owner = self.owner(node)
        for job in [owner] if owner else self.jobs:
            self._restart(job)

    def _drop(self, node: int, severity: int) -> None:
        job = self.owner(node)
        if job is None:
            return
        if self.replicas[job.task].drop(node):
            job.hit(self.detection_s(), self.restart_s(job, node, severity))
        self._restart(job)

    def _restart(self, job: TrainingJob) -> None:
        """Restart replicas on free nodes until there are as many as there should be; spare nodes of the cluster take
        part for good."""
        replicas = self.replicas[job.task]
        while len(replicas.training) + len(replicas.restarting) < replicas.full_count:
            free = replicas.free()
            spare = self.unowned()[: max(0, replicas.size - len(free))]
            if len(free) + len(spare) < replicas.size:
                return
            for node in spare:
                self.add_node(job, node)
            replica = tuple([*free, *spare][: replicas.size])
            replicas.restarting[replica] = self.world.clock.after(
                to_us(self.assumptions.ft_hsdp_restart_s),
                lambda replica=replica: self._join(job, replica),  # type: ignore[misc]
            )

    def _join(self, job: TrainingJob, replica: Replica) -> None:
        """Let a replica train that has caught up."""
        replicas = self.replicas[job.task]
        del replicas.restarting[replica]
        replicas.training.append(replica)
        if job.phase is CostPhase.IDLE:
            job.try_to_start()
        self.on_start(job)

    def on_start(self, job: TrainingJob) -> None:
        """Let the replicas train, too, that have come since the restart began."""
        nodes = self.replicas[job.task].nodes
        if job.phase is CostPhase.RUNNING and nodes != job.nodes:
            job.run(nodes)
