"""ReCycle (SOSP 2024): the micro-batches of a failed worker go to its data-parallel peers, into the pipelines' bubbles.

A job keeps one form: tp x pp x dp. When workers of a stage are lost, its other replicas compute their micro-batches,
too; nothing else changes, no state moves (`recycle_reroute_s`). Because the backward pass is split in two and the
stages' optimizer steps are staggered, bubbles take that work up, and only what they do not take lengthens the
iteration:

    iteration = max(micro-batches x slope + bubble, micro-batches of a peer x slope) + reduction + optimizer

A repaired node joins at an iteration's end and copies its stage from a peer (`recycle_join_s`). A stage that has lost
all its replicas ends the job: a new form on the nodes that are left, from the checkpoint (`rebuild_s`); nodes that come
back after that are used by a new form, too.

Assumed: GPUs are numbered tensor first, then data, then pipeline, so a node holds replicas of one stage where it can;
bubbles can be used whole; the slowest stage is the one hit; the memory of deferred weight gradients costs nothing.

The price, computed: no interleaving, whole optimizer states in every replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from replay.evaluation.policies.job import Elastic, Job
from replay.evaluation.speeds import Speeds, fastest, priced, restricted
from replay.evaluation.workload import Cluster, TrainingTask, Workload
from replay.evaluation.world import World
from unicrond.throughput.model import Estimate


def recycle_speeds(work: Workload) -> Speeds:
    """The best form at each number of nodes, nothing lost."""
    return priced(work, restricted)


@lru_cache(maxsize=1024)
def _estimate(task: TrainingTask, cluster: Cluster, nodes: int) -> Estimate | None:
    return fastest(restricted(task.job(cluster)), nodes * cluster.per_node)


@dataclass(frozen=True)
class Form:
    """The job's form on `nodes`, those in use, in the order of their GPUs."""

    estimate: Estimate
    nodes: tuple[int, ...]

    def most_lost(self, there: Collection[int]) -> int:
        """Replicas that the worst-hit stage has lost when only the nodes `there` are left."""
        layout, per_node = self.estimate.layout, self.estimate.job.gpu.per_node
        stage_gpus = layout.tp * self.estimate.dp
        lost: set[tuple[int, int]] = set()
        for place, node in enumerate(self.nodes):
            if node not in there:
                gpus = range(place * per_node, min((place + 1) * per_node, self.estimate.gpus))
                lost |= {(gpu // stage_gpus, gpu % stage_gpus // layout.tp) for gpu in gpus}
        return max(Counter(stage for stage, _ in lost).values(), default=0)

    def has_peers(self, there: Collection[int]) -> bool:
        """Every stage has a replica left."""
        return self.most_lost(there) < self.estimate.dp

    def flops_per_s(self, there: Collection[int]) -> int:
        """What the nodes `there` achieve; 0 if a stage has no replica."""
        lost = self.most_lost(there)
        if lost >= self.estimate.dp:
            return 0
        parts, count = self.estimate.parts, self.estimate.micro_batches
        work_s = parts.compute_s + parts.tp_s + parts.transfer_s
        dealt = self.estimate.job.batch // self.estimate.layout.micro_batch
        peers_s = work_s / count * -(-dealt // (self.estimate.dp - lost))
        iteration_s = max(work_s + parts.bubble_s, peers_s) + parts.dp_s + parts.optimizer_s
        return round(self.estimate.job.flops_per_iteration / iteration_s)


class ReCycle(Elastic):
    """Re-routing. `forms`: of each task that runs."""

    def __init__(self, world: World) -> None:
        super().__init__(world, speeds=recycle_speeds(world.workload))
        self.forms: dict[str, Form] = {}
        self._tasks = {task.name: task for task in world.workload.tasks}

    def detection_s(self) -> float:
        """A broken connection."""
        return self.assumed.elastic_detect_s

    def restart_s(self, job: Job, node: int, severity: int) -> float:
        """Another dealing of micro-batches; without a peer a new form, from the checkpoint."""
        if severity == 3:
            return self.assumed.recycle_reroute_s
        if not self.forms[job.task].has_peers(set(job.there()) - {node}):
            return self.assumed.rebuild_s + self.assumed.checkpoint_load_s + self.assumed.recompute_s
        return self.assumed.recycle_reroute_s + (self.assumed.recycle_join_s if severity == 2 else 0.0)

    def seats(self, job: Job) -> Sequence[int] | None:
        """The form's nodes that are there; those of a new form where the old one lacks a stage or a node came back."""
        there, form = job.there(), self.forms.get(job.task)
        if form is None or not form.has_peers(there) or not set(form.nodes).issuperset(there):
            estimate = _estimate(self._tasks[job.task], self.world.workload.cluster, len(there)) if there else None
            if estimate is None:
                self.forms.pop(job.task, None)
                return None
            used = -(-estimate.gpus // self.world.workload.cluster.per_node)
            form = self.forms[job.task] = Form(estimate, tuple(there[:used]))
        return [node for node in form.nodes if node in set(there)]

    def rate(self, job: Job, nodes: Sequence[int]) -> int:
        """What the form achieves on them."""
        task, form = self._tasks[job.task], self.forms.get(job.task)
        return int(task.weight * form.flops_per_s(set(nodes))) if form and len(nodes) else 0

    def started(self, job: Job) -> None:
        """Nodes that came meanwhile join; one that the form does not know asks for a new form."""
        came = set(job.there()) - job.seen
        if came:
            known = came.issubset(self.forms[job.task].nodes)
            job.pause(self.assumed.recycle_join_s if known else self.assumed.rebuild_s)

    def join_s(self) -> float:
        """A node copies its stage."""
        return self.assumed.recycle_join_s
