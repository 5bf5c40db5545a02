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

from replay.evaluation.meter import Phase
from replay.evaluation.policies.job import Job, JobByJob
from replay.evaluation.virtual_time import Timer, to_us
from replay.evaluation.world import World

Replica = tuple[int, ...]


class Replicas:
    """A job's replicas: `training`, in their order, and `restarting` ones with what ends their restart."""

    def __init__(self, job: Job, size: int) -> None:
        self.job = job
        self.size = size
        self.wanted = len(job.home) // size
        self.training: list[Replica] = [tuple(job.home[nth * size : (nth + 1) * size]) for nth in range(self.wanted)]
        self.restarting: dict[Replica, Timer] = {}

    @property
    def nodes(self) -> list[int]:
        """Of the replicas that train."""
        return [node for replica in self.training for node in replica]

    def free(self) -> list[int]:
        """The job's nodes that are there and in no replica."""
        taken = set(self.nodes).union(*self.restarting)
        return [node for node in self.job.there() if node not in taken]

    def drop(self, node: int) -> bool:
        """The node's replica is out; True if it was training."""
        for replica in [replica for replica in self.restarting if node in replica]:
            self.restarting.pop(replica).cancel()
        hit = [replica for replica in self.training if node in replica]
        self.training = [replica for replica in self.training if node not in replica]
        return bool(hit)


class FtHsdp(JobByJob):
    """Replicas that come and go. `replicas`: of each task."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.replicas: dict[str, Replicas] = {}
        for task, job in zip(world.workload.tasks, self.jobs, strict=True):
            fewest = world.workload.speeds[task.name].least(task.min_nodes)
            size = max(fewest, round(self.assumed.ft_hsdp_replica_nodes))
            self.replicas[task.name] = Replicas(job, max(1, min(size, len(job.home))))

    def detection_s(self) -> float:
        """A part of the published stall."""
        return min(self.assumed.elastic_detect_s, self.assumed.ft_hsdp_stall_s)

    def restart_s(self, job: Job, node: int, severity: int) -> float:
        """The rest of the stall; from a checkpoint when the last replica is gone."""
        rest_s = self.assumed.ft_hsdp_stall_s - self.detection_s()
        if self.replicas[job.task].training:
            return rest_s
        return rest_s + self.assumed.checkpoint_load_s + self.assumed.recompute_s

    def seats(self, job: Job) -> Sequence[int] | None:
        """The replicas that train."""
        return self.replicas[job.task].nodes or None

    def rate(self, job: Job, nodes: Sequence[int]) -> int:
        """Their share of what all achieve."""
        replicas = self.replicas[job.task]
        whole = replicas.wanted * replicas.size
        in_all, alone = (super(FtHsdp, self).rate(job, range(count)) for count in (whole, len(nodes)))
        return min(in_all * len(nodes) // max(1, whole), alone)

    def node_lost(self, node: int) -> None:
        """Its replica drops out."""
        self._drop(node, 1)

    def fault(self, node: int, severity: int) -> None:
        """The same, and the node can be used at once."""
        self._drop(node, severity)

    def node_back(self, node: int) -> None:
        """It may complete a replica: of its job, or as a spare of any."""
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

    def _restart(self, job: Job) -> None:
        """Replicas restart on free nodes, as many as there should be; spare nodes of the cluster take part for good."""
        replicas = self.replicas[job.task]
        while len(replicas.training) + len(replicas.restarting) < replicas.wanted:
            free = replicas.free()
            spare = self.unowned()[: max(0, replicas.size - len(free))]
            if len(free) + len(spare) < replicas.size:
                return
            for node in spare:
                self.take(job, node)
            replica = tuple([*free, *spare][: replicas.size])
            replicas.restarting[replica] = self.world.clock.after(
                to_us(self.assumed.ft_hsdp_restart_s),
                lambda replica=replica: self._join(job, replica),  # type: ignore[misc]
            )

    def _join(self, job: Job, replica: Replica) -> None:
        """It has caught up."""
        replicas = self.replicas[job.task]
        del replicas.restarting[replica]
        replicas.training.append(replica)
        if job.phase is Phase.IDLE:
            job.try_to_start()
        self.started(job)

    def started(self, job: Job) -> None:
        """Replicas that have come meanwhile train, too."""
        nodes = self.replicas[job.task].nodes
        if job.phase is Phase.RUNNING and nodes != job.nodes:
            job.run(nodes)
