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

from replay.evaluation.policies.job import Elastic, Job
from replay.evaluation.speeds import Speeds, restricted
from replay.evaluation.templates import Templates, best_templates
from replay.evaluation.workload import Cluster, Speed, TrainingTask, Workload
from replay.evaluation.world import World

#: f + 1 pipelines survive f simultaneous faults.
REPLICAS = 2

Pipelines = list[list[int]]


def _templates(task: TrainingTask, cluster: Cluster, nodes: int) -> Templates | None:
    return best_templates(restricted(task.job(cluster), ragged=True), nodes, REPLICAS)


@lru_cache(maxsize=1024)
def _speed(task: TrainingTask, cluster: Cluster, most: int) -> Speed:
    flops = [0]
    for nodes in range(1, most + 1):
        made = _templates(task, cluster, nodes)
        flops.append(max(flops[-1], made.flops_per_s(made.best_sizes(nodes, REPLICAS)) if made else 0))
    return Speed(tuple(flops))


def oobleck_speeds(work: Workload) -> Speeds:
    """The best instantiation at each number of nodes."""
    return {task.name: _speed(task, work.cluster, work.most(task)) for task in work.tasks}


def reinstantiated(pipelines: Pipelines, there: set[int], templates: Templates) -> Pipelines:
    """The pipelines on the nodes of theirs that are `there`: those that lost nobody first, as they were."""
    whole = [list(pipeline) for pipeline in pipelines if there.issuperset(pipeline)]
    broken = [[node for node in pipeline if node in there] for pipeline in pipelines if not there.issuperset(pipeline)]
    made: Pipelines = list(whole)
    few: Pipelines = []
    for pipeline in broken:
        (made if len(pipeline) in templates.by_nodes else few).append(pipeline)
    for pipeline in few:
        while pipeline and len(pipeline) < templates.fewest:
            richest = max(made, key=len, default=[])
            if len(richest) <= templates.fewest:
                break
            pipeline.append(richest.pop())
        if len(pipeline) in templates.by_nodes:
            made.append(pipeline)
        else:
            _share_out(pipeline, made, templates)
    return made


def _share_out(nodes: list[int], pipelines: Pipelines, templates: Templates) -> None:
    """Each node to the smallest pipeline that has a template for one more."""
    for node in nodes:
        takers = [pipeline for pipeline in pipelines if len(pipeline) + 1 in templates.by_nodes]
        if takers:
            min(takers, key=len).append(node)


def instantiated(pipelines: Pipelines, nodes: Sequence[int], templates: Templates) -> Pipelines:
    """The best combination for `nodes`; pipelines of these nodes and of a size that it has stay as they are."""
    sizes = sorted(templates.best_sizes(len(nodes), REPLICAS), reverse=True)
    there = set(nodes)
    made: Pipelines = []
    for pipeline in pipelines:
        if len(pipeline) in sizes and there.issuperset(pipeline):
            sizes.remove(len(pipeline))
            there.difference_update(pipeline)
            made.append(list(pipeline))
    left = [node for node in nodes if node in there]
    for size in sizes:
        made.append(left[:size])
        left = left[size:]
    return made


class Oobleck(Elastic):
    """Templates and re-instantiation. `pipelines`: of each task, the nodes of each."""

    def __init__(self, world: World) -> None:
        super().__init__(world, speeds=oobleck_speeds(world.workload))
        self.pipelines: dict[str, Pipelines] = {}
        self._weights = {task.name: task.weight for task in world.workload.tasks}
        self._templates: dict[str, Templates] = {}
        for task, job in zip(world.workload.tasks, self.jobs, strict=True):
            made = _templates(task, world.workload.cluster, len(job.home))
            if made is not None:
                self._templates[task.name] = made

    def detection_s(self) -> float:
        """A broken connection."""
        return self.assumed.elastic_detect_s

    def restart_s(self, job: Job, node: int, severity: int) -> float:
        """New pipelines; from a checkpoint if no whole one is left."""
        reinstantiate_s = self.assumed.oobleck_reinstantiate_s
        if severity == 3 or self._keeps_state(job, node):
            return reinstantiate_s
        return reinstantiate_s + self.assumed.checkpoint_load_s + self.assumed.recompute_s

    def _keeps_state(self, job: Job, node: int) -> bool:
        return any(
            node not in pipeline and all(self.world.up(each) for each in pipeline)
            for pipeline in self.pipelines.get(job.task, [])
        )

    def seats(self, job: Job) -> Sequence[int] | None:
        """The nodes of the pipelines, instantiated again."""
        templates = self._templates.get(job.task)
        if templates is None:
            return None
        there, before = job.there(), self.pipelines.get(job.task, [])
        kept = reinstantiated(before, set(there), templates)
        joined = set(there).difference(*kept)
        self.pipelines[job.task] = instantiated(kept, there, templates) if joined or not kept else kept
        return [node for pipeline in self.pipelines[job.task] for node in pipeline]

    def rate(self, job: Job, nodes: Sequence[int]) -> int:
        """What the pipelines achieve together."""
        sizes = [len(pipeline) for pipeline in self.pipelines.get(job.task, [])]
        made = self._templates[job.task].flops_per_s(sizes) if sizes else 0
        return int(self._weights[job.task] * made)

    def join_s(self) -> float:
        """The node joins."""
        return self.assumed.oobleck_reinstantiate_s
