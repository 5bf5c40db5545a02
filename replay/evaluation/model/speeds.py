"""The tables T(t, x) of systems that cannot have every layout, or that pay for their mechanism.

Rules
-----
* A price is computed: the throughput model (docs/design/throughput.md) answers the same question under the system's
  restrictions (`restricted_job`), or with the work and memory that its mechanism adds (`speeds_under`).
* The software below is Megatron's for every system: its kernels, its attention. What an older stack costs beside the
  mechanism is not a system's price; the published ratio, where there is one, is shown beside the computed one.

What does not live here: what the restrictions are (each system's file in `policies/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from unicrond.replay.evaluation.model.workload import Cluster, Speed, TrainingTask, Workload, by_node
from unicrond.throughput.layouts import ThroughputQuery, pipeline_degrees, tensor_degrees
from unicrond.throughput.model import Cost, Estimate, best, iteration_s, memory_bytes, table

Speeds: TypeAlias = Mapping[str, Speed]


def restricted_job(question: ThroughputQuery, *, ragged: bool = False) -> ThroughputQuery:
    """Restrict the question to a stack whose replicas hold whole optimizer states, so that one can stand in for
    another.

    Not interleaved. `ragged`: pipelines are cut into any number of stages."""
    stack = replace(question.stack, distributed_optimizer=False, ragged=ragged)
    return replace(question, stack=stack, chunks=1)


def speeds_under(
    work: Workload,
    restrict: Callable[[ThroughputQuery], ThroughputQuery],
    *,
    seconds: Cost = iteration_s,
    needed_bytes: Cost = memory_bytes,
) -> Speeds:
    """Return the table of a system that searches all layouts under `restrict`, at these costs of a layout."""
    return {
        task.name: _speed_under(task, work.cluster, work.most(task), restrict, seconds, needed_bytes)
        for task in work.tasks
    }


@lru_cache(maxsize=1024)
def _speed_under(
    task: TrainingTask,
    cluster: Cluster,
    most: int,
    restrict: Callable[[ThroughputQuery], ThroughputQuery],
    seconds: Cost,
    needed_bytes: Cost,
) -> Speed:
    flops = table(restrict(task.job(cluster)), most * cluster.per_node, seconds=seconds, needed_bytes=needed_bytes)
    return Speed(by_node(flops, cluster, most))


def fastest(question: ThroughputQuery, gpus: int) -> Estimate | None:
    """Return the best layout on `gpus` GPUs or fewer, the others idle; None where nothing fits."""
    flops = table(question, gpus)
    if not flops:
        return None
    estimate = best(question, max(flops, key=lambda count: (flops[count], -count)))
    assert isinstance(estimate, Estimate)
    return estimate


# --- one layout for good ---------------------------------------------------------------------------


def fixed_speeds(work: Workload, plan: Mapping[str, int]) -> Speeds:
    """Return the table where every task keeps one tp x pp: the task's own, or the fastest on the nodes that `plan`
    gives it."""
    return {
        task.name: work.speeds[task.name]
        if task.layout != "best"
        else _fixed_speed(task, work.cluster, work.most(task), max(plan[task.name], task.min_nodes))
        for task in work.tasks
    }


@lru_cache(maxsize=1024)
def _fixed_speed(task: TrainingTask, cluster: Cluster, most: int, nodes: int) -> Speed:
    tp, pp = fixed_layout(task, cluster, nodes)
    flops = table(task.job(cluster, tp=tp, pp=pp), most * cluster.per_node)
    return Speed(by_node(flops, cluster, most), -(-tp * pp // cluster.per_node))


@lru_cache(maxsize=1024)
def fixed_layout(task: TrainingTask, cluster: Cluster, nodes: int) -> tuple[int, int]:
    """Return (tp, pp) of the fastest layout on `nodes` nodes whose replicas share nodes evenly, or fill whole ones."""
    question = task.job(cluster)
    fastest_estimate: Estimate | None = None
    for tp in tensor_degrees(question.model, question.gpu):
        for pp in pipeline_degrees(question.model, question.stack):
            replica = tp * pp
            replicas = min(nodes * cluster.per_node // replica, question.batch)
            if (cluster.per_node % replica and replica % cluster.per_node) or not replicas:
                continue
            estimate = best(replace(question, tp=tp, pp=pp), replicas * replica)
            if isinstance(estimate, Estimate) and (
                fastest_estimate is None or estimate.flops_per_s > fastest_estimate.flops_per_s
            ):
                fastest_estimate = estimate
    if fastest_estimate is None:
        raise ValueError(f"task {task.name}: no layout fits {nodes} nodes; give it more")
    return fastest_estimate.layout.tp, fastest_estimate.layout.pp
