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

from unicrond.replay.evaluation.model.speeds import Speeds, fastest, restricted_job, speeds_under
from unicrond.replay.evaluation.model.workload import Cluster, TrainingTask, Workload
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.policies.job import Elastic, TrainingJob
from unicrond.throughput.model import Estimate


def recycle_speeds(work: Workload) -> Speeds:
    """Return the speeds of the best form at each number of nodes, with nothing lost."""
    return speeds_under(work, restricted_job)


@lru_cache(maxsize=1024)
def _estimate(task: TrainingTask, cluster: Cluster, nodes: int) -> Estimate | None:
    return fastest(restricted_job(task.job(cluster)), nodes * cluster.per_node)


@dataclass(frozen=True)
class PipelineForm:
    """The job's form on `nodes`, those in use, in the order of their GPUs."""

    estimate: Estimate
    nodes: tuple[int, ...]

    def most_lost(self, up: Collection[int]) -> int:
        """Count the replicas that the worst-hit stage has lost when only the nodes `up` are left."""
        layout, per_node = self.estimate.layout, self.estimate.job.gpu.per_node
        stage_gpus = layout.tp * self.estimate.dp
        losses: set[tuple[int, int]] = set()
        for place, node in enumerate(self.nodes):
            if node not in up:
                gpus = range(place * per_node, min((place + 1) * per_node, self.estimate.gpus))
                losses |= {(gpu // stage_gpus, gpu % stage_gpus // layout.tp) for gpu in gpus}
        return max(Counter(stage for stage, _ in losses).values(), default=0)

    def has_peers(self, up: Collection[int]) -> bool:
        """Return whether every stage has a replica left."""
        return self.most_lost(up) < self.estimate.dp

    def flops_per_s(self, up: Collection[int]) -> int:
        """Return what the nodes `up` achieve, FLOP/s; 0 if a stage has no replica."""
        losses = self.most_lost(up)
        if losses >= self.estimate.dp:
            return 0
        parts, count = self.estimate.parts, self.estimate.micro_batches
        work_s = parts.compute_s + parts.tp_s + parts.transfer_s
        micro_batches = self.estimate.job.batch // self.estimate.layout.micro_batch
        peers_s = work_s / count * -(-micro_batches // (self.estimate.dp - losses))
        iteration_s = max(work_s + parts.bubble_s, peers_s) + parts.dp_s + parts.optimizer_s
        return round(self.estimate.job.flops_per_iteration / iteration_s)


class ReCycle(Elastic):
    """Gives micro-batches of lost workers to their data-parallel peers. `forms`: the form of each task that runs."""

    def __init__(self, world: EvaluationWorld) -> None:
        super().__init__(world, speeds=recycle_speeds(world.workload))
        self.forms: dict[str, PipelineForm] = {}
        self._tasks = {task.name: task for task in world.workload.tasks}

    def detection_s(self) -> float:
        """Return the time until a broken connection is noticed."""
        return self.assumptions.elastic_detect_s

    def restart_s(self, job: TrainingJob, node: int, severity: int) -> float:
        """Return the time to assign the micro-batches anew; without a peer that of a new form, from the checkpoint."""
        if severity == 3:
            return self.assumptions.recycle_reroute_s
        if not self.forms[job.task].has_peers(set(job.nodes_up()) - {node}):
            return self.assumptions.rebuild_s + self.assumptions.checkpoint_load_s + self.assumptions.recompute_s
        return self.assumptions.recycle_reroute_s + (self.assumptions.recycle_join_s if severity == 2 else 0.0)

    def pick_nodes(self, job: TrainingJob) -> Sequence[int] | None:
        """Return the form's nodes that are up; those of a new form where the old one lacks a stage or a node came
        back."""
        up, form = job.nodes_up(), self.forms.get(job.task)
        if form is None or not form.has_peers(up) or not set(form.nodes).issuperset(up):
            estimate = _estimate(self._tasks[job.task], self.world.workload.cluster, len(up)) if up else None
            if estimate is None:
                self.forms.pop(job.task, None)
                return None
            node_count = -(-estimate.gpus // self.world.workload.cluster.per_node)
            form = self.forms[job.task] = PipelineForm(estimate, tuple(up[:node_count]))
        return [node for node in form.nodes if node in set(up)]

    def rate(self, job: TrainingJob, nodes: Sequence[int]) -> int:
        """Return what the form achieves on these nodes."""
        task, form = self._tasks[job.task], self.forms.get(job.task)
        return int(task.weight * form.flops_per_s(set(nodes))) if form and len(nodes) else 0

    def on_start(self, job: TrainingJob) -> None:
        """Let nodes join that have come since the nodes were picked; one outside the form needs a new form."""
        newcomers = set(job.nodes_up()) - job.candidates
        if newcomers:
            is_in_form = newcomers.issubset(self.forms[job.task].nodes)
            job.pause(self.assumptions.recycle_join_s if is_in_form else self.assumptions.rebuild_s)

    def join_s(self) -> float:
        """Return the time in which a node copies its stage."""
        return self.assumptions.recycle_join_s
