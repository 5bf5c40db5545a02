"""What an operator gives the coordinator for a simulated workload: configuration, and the tasks as submitted."""

from __future__ import annotations

from unicrond.core.state.policy import Policy
from unicrond.core.tasks.task_rules import WAF_MAX
from unicrond.events import vocabulary as v
from unicrond.replay.evaluation.model.speeds import Speeds
from unicrond.replay.evaluation.model.workload import Speed, TrainingTask, Workload
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.simulator.plan_rules import Rule
from unicrond.throughput.presets import MODELS

#: More than any run commits: a task of the simulation has no end.
_ITERATIONS = 2**50


def policy_for(world: EvaluationWorld) -> Policy:
    """Build the coordinator's configuration: it knows the trace's failure rate and how long its transitions are."""
    assumptions = world.assumptions
    transition_s = assumptions.regroup_s + assumptions.transfer_s + assumptions.redeal_s
    return Policy(
        worker_start_s=2 * assumptions.start_s + 60.0,
        regroup_s=2 * (transition_s + assumptions.checkpoint_load_s) + 60.0,
        worker_mtbf_s=world.trace.node_mtbf_s,
        transition_s=max(transition_s, 0.001),
    )


def first_plan(workload: Workload, rule: Rule) -> dict[str, int]:
    """Return the nodes per task from a standing start, the layouts still free."""
    return {task.name: count for task, count in rule(workload.problem(workload.cluster.nodes, workload.speeds))}


def flops_scale(workload: Workload) -> int:
    """Return the divisor of every T and every batch: the log's FLOP/s are integers, together less than WAF_MAX."""
    scale = 1
    while sum(workload.failure_free.values()) // scale > WAF_MAX // 2:
        scale *= 2
    return scale


def task_specs(workload: Workload, speeds: Speeds, scale: int = 1) -> list[v.TaskSpec]:
    """Return the tasks as they would be submitted, one worker per node. `scale`: see `flops_scale`."""
    return [_spec(workload, task, speeds[task.name], scale) for task in workload.tasks]


def _spec(workload: Workload, task: TrainingTask, speed: Speed, scale: int) -> v.TaskSpec:
    """Build one task. A replica of several nodes is as many stages: layers are rounded up to that, and only whole
    replicas have a throughput."""
    model, most = MODELS[task.model], workload.most(task) // speed.unit * speed.unit
    return v.TaskSpec(
        name=task.name,
        weight=task.weight,
        min_workers=speed.least(task.min_nodes),
        max_workers=most,
        pp=speed.unit,
        model=v.ModelSpec(
            layers=-(-model.layers // speed.unit) * speed.unit,
            hidden=model.hidden_size,
            heads=model.heads,
            seq=model.seq,
            vocab=model.vocab,
        ),
        global_batch=max((task.batch or model.batch) // scale, most // speed.unit),
        iterations=_ITERATIONS,
        throughput={str(nodes): speed.flops[nodes] // scale for nodes in range(speed.unit, most + 1, speed.unit)},
    )
