"""Oobleck (SOSP 2023): pipeline templates, made beforehand for every number of nodes that a pipeline may have.

A job runs pipelines of different sizes, at least `REPLICAS` (f + 1, f = 1) of them where its nodes allow that. When a
node dies, the pipelines are instantiated again from the templates:
* a pipeline that lost nobody stays as it is;
* one that still has enough nodes takes the template for so many;
* one that has too few borrows nodes of the largest pipelines that can spare them;
* else its nodes go to the smallest pipelines. No node is idle while a template takes it.
Missing layers are copied from other pipelines: no checkpoint, no recomputation beyond the iteration
(`oobleck_reinstantiate_s`, copying included). Without a whole pipeline left the job starts from a checkpoint (layers
that several broken pipelines hold between them are not used). For a repaired node the best combination is instantiated,
and pipelines that are of a size that it has stay as they are.

Assumed: of all combinations those are tried whose pipelines differ by one node at most; a stage that has several GPUs
is tensor parallel (Oobleck shards it; the model has no such sharding).

The price, computed: no interleaving, whole optimizer states in every pipeline, two pipelines at least. Stages may
differ by a layer. Its kernels are Megatron's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from unicrond.replay.evaluation.model.speeds import Speeds, restricted_job
from unicrond.replay.evaluation.model.templates import Templates, best_templates
from unicrond.replay.evaluation.model.workload import Cluster, Speed, TrainingTask, Workload
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.policies.job import Elastic, TrainingJob

#: f + 1 pipelines survive f simultaneous faults.
REPLICAS = 2

Pipelines = list[list[int]]


def _templates(task: TrainingTask, cluster: Cluster, nodes: int) -> Templates | None:
    return best_templates(restricted_job(task.job(cluster), ragged=True), nodes, REPLICAS)


@lru_cache(maxsize=1024)
def _speed(task: TrainingTask, cluster: Cluster, most: int) -> Speed:
    flops = [0]
    for nodes in range(1, most + 1):
        templates = _templates(task, cluster, nodes)
        flops.append(max(flops[-1], templates.flops_per_s(templates.best_sizes(nodes, REPLICAS)) if templates else 0))
    return Speed(tuple(flops))


def oobleck_speeds(work: Workload) -> Speeds:
    """Return the speeds of the best instantiation at each number of nodes."""
    return {task.name: _speed(task, work.cluster, work.most(task)) for task in work.tasks}


def reinstantiate(pipelines: Pipelines, up: set[int], templates: Templates) -> Pipelines:
    """Return the pipelines on those of their nodes that are `up`: first the pipelines that lost no node, unchanged."""
    whole = [list(pipeline) for pipeline in pipelines if up.issuperset(pipeline)]
    broken = [[node for node in pipeline if node in up] for pipeline in pipelines if not up.issuperset(pipeline)]
    result: Pipelines = list(whole)
    few: Pipelines = []
    for pipeline in broken:
        (result if len(pipeline) in templates.by_nodes else few).append(pipeline)
    for pipeline in few:
        while pipeline and len(pipeline) < templates.fewest:
            richest = max(result, key=len, default=[])
            if len(richest) <= templates.fewest:
                break
            pipeline.append(richest.pop())
        if len(pipeline) in templates.by_nodes:
            result.append(pipeline)
        else:
            _share_out(pipeline, result, templates)
    return result


def _share_out(nodes: list[int], pipelines: Pipelines, templates: Templates) -> None:
    """Append each node to the smallest pipeline that has a template for one more."""
    for node in nodes:
        takers = [pipeline for pipeline in pipelines if len(pipeline) + 1 in templates.by_nodes]
        if takers:
            min(takers, key=len).append(node)


def instantiate(pipelines: Pipelines, nodes: Sequence[int], templates: Templates) -> Pipelines:
    """Return the best combination for `nodes`; pipelines of these nodes and of a size that it has stay as they are."""
    sizes = sorted(templates.best_sizes(len(nodes), REPLICAS), reverse=True)
    free = set(nodes)
    result: Pipelines = []
    for pipeline in pipelines:
        if len(pipeline) in sizes and free.issuperset(pipeline):
            sizes.remove(len(pipeline))
            free.difference_update(pipeline)
            result.append(list(pipeline))
    rest = [node for node in nodes if node in free]
    for size in sizes:
        result.append(rest[:size])
        rest = rest[size:]
    return result


class Oobleck(Elastic):
    """Instantiates pipelines from templates again after each fault. `pipelines`: of each task, the nodes of each."""

    def __init__(self, world: EvaluationWorld) -> None:
        super().__init__(world, speeds=oobleck_speeds(world.workload))
        self.pipelines: dict[str, Pipelines] = {}
        self._weights = {task.name: task.weight for task in world.workload.tasks}
        self._templates: dict[str, Templates] = {}
        for task, job in zip(world.workload.tasks, self.jobs, strict=True):
            templates = _templates(task, world.workload.cluster, len(job.home))
            if templates is not None:
                self._templates[task.name] = templates

    def detection_s(self) -> float:
        """Return the time until a broken connection is noticed."""
        return self.assumptions.elastic_detect_s

    def restart_s(self, job: TrainingJob, node: int, severity: int) -> float:
        """Return the time until the new pipelines train; from a checkpoint if no whole one is left."""
        reinstantiate_s = self.assumptions.oobleck_reinstantiate_s
        if severity == 3 or self._keeps_state(job, node):
            return reinstantiate_s
        return reinstantiate_s + self.assumptions.checkpoint_load_s + self.assumptions.recompute_s

    def _keeps_state(self, job: TrainingJob, node: int) -> bool:
        return any(
            node not in pipeline and all(self.world.up(member) for member in pipeline)
            for pipeline in self.pipelines.get(job.task, [])
        )

    def pick_nodes(self, job: TrainingJob) -> Sequence[int] | None:
        """Return the nodes of the pipelines, instantiated again."""
        templates = self._templates.get(job.task)
        if templates is None:
            return None
        up, before = job.nodes_up(), self.pipelines.get(job.task, [])
        pipelines = reinstantiate(before, set(up), templates)
        newcomers = set(up).difference(*pipelines)
        self.pipelines[job.task] = instantiate(pipelines, up, templates) if newcomers or not pipelines else pipelines
        return [node for pipeline in self.pipelines[job.task] for node in pipeline]

    def rate(self, job: TrainingJob, nodes: Sequence[int]) -> int:
        """Return what the pipelines achieve together."""
        sizes = [len(pipeline) for pipeline in self.pipelines.get(job.task, [])]
        flops_per_s = self._templates[job.task].flops_per_s(sizes) if sizes else 0
        return int(self._weights[job.task] * flops_per_s)

    def join_s(self) -> float:
        """Return the time until the node has joined."""
        return self.assumptions.oobleck_reinstantiate_s
