"""What a simulated cluster is and what it trains: nodes, tasks, and the table T(t, x) of Megatron on them.

The unit is the node: a policy gives a task whole nodes, T(t, x) is the achieved FLOP/s on x of them, in the
best layout that `unicrond.throughput.model` finds, idle GPUs allowed (so it never falls with x). A system that
cannot have all of these layouts, or pays for its mechanism, has a table of its own (`speeds.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from unicrond.core.planning.problem import Problem, TaskProblem
from unicrond.core.planning.solver import solve
from unicrond.core.state.field_faults import faults
from unicrond.events.vocabulary import Name
from unicrond.events.vocabulary.phrases import guess
from unicrond.intake import strict_yaml
from unicrond.throughput.layouts import ThroughputQuery, job
from unicrond.throughput.model import table
from unicrond.throughput.presets import GPUS, MODELS

GPUS_MAX = 131_072


class WorkloadError(ValueError):
    """A cluster or a list of tasks that cannot be; one line that names the field and the fix."""


@dataclass(frozen=True)
class Cluster:
    """A cluster: `nodes` nodes of `per_node` GPUs of one kind."""

    gpu: str
    nodes: int
    per_node: int = 8

    @property
    def gpus(self) -> int:
        """Count the GPUs of all nodes."""
        return self.nodes * self.per_node


class TrainingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task. `min_nodes`: worth nothing on fewer, and its floor. `max_nodes`: 0 = as many as there are.

    `layout`: "best" at each number of nodes, or "8x2" (tp x pp) for good, for every system. `batch`: sequences per
    iteration, 0 = the model's.
    """

    name: Name
    model: str
    weight: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    min_nodes: Annotated[int, Meta(ge=1)] = 1
    max_nodes: Annotated[int, Meta(ge=0)] = 0
    layout: Annotated[str, Meta(pattern=r"^(best|[0-9]{1,3}x[0-9]{1,3})\Z")] = "best"
    batch: Annotated[int, Meta(ge=0, le=1_000_000)] = 0

    def job(self, cluster: Cluster, **restrictions: Any) -> ThroughputQuery:
        """Return the question to the throughput model, under what `layout` fixes and a system restricts."""
        if self.layout != "best":
            tp, pp = map(int, self.layout.split("x"))
            restrictions = {"tp": tp, "pp": pp, **restrictions}
        return job(MODELS[self.model], GPUS[cluster.gpu], batch=self.batch or None, **restrictions)


@dataclass(frozen=True)
class Speed:
    """How fast a system trains one task. `flops[n]`: T on n nodes, FLOP/s, never falling; `unit`: nodes of a replica,
    1 where the layout is free or fits a node.
    """

    flops: tuple[int, ...]
    unit: int = 1

    def least(self, nodes: int) -> int:
        """Return the fewest nodes, `nodes` or more, in whole replicas, on which the task trains; beyond `flops` if
        none."""
        feasible = next((n for n, flops in enumerate(self.flops) if flops), len(self.flops))
        return -(-max(nodes, feasible) // self.unit) * self.unit


@dataclass(frozen=True)
class Workload:
    """A cluster and its tasks."""

    cluster: Cluster
    tasks: tuple[TrainingTask, ...]

    @cached_property
    def speeds(self) -> Mapping[str, Speed]:
        """Compute Megatron's speeds, in the best layout at each number of nodes (or the task's own)."""
        return {task.name: _speed(task, self.cluster) for task in self.tasks}

    @cached_property
    def throughput(self) -> Mapping[str, tuple[int, ...]]:
        """List T(0..n) per task, FLOP/s on so many nodes; never falling."""
        return {name: speed.flops for name, speed in self.speeds.items()}

    @cached_property
    def worth(self) -> Mapping[str, tuple[int, ...]]:
        """Compute F(0..n) = weight * T per task, and 0 below its minimum; weighted FLOP/s."""
        return self.worth_at(self.speeds)

    def worth_at(self, speeds: Mapping[str, Speed]) -> Mapping[str, tuple[int, ...]]:
        """Compute the same at a system's speeds."""
        return {
            task.name: tuple(
                int(task.weight * flops) if nodes >= task.min_nodes else 0
                for nodes, flops in enumerate(speeds[task.name].flops)
            )
            for task in self.tasks
        }

    def most(self, task: TrainingTask) -> int:
        """Return the most nodes that the task may have."""
        return min(task.max_nodes or self.cluster.nodes, self.cluster.nodes)

    def problem(self, nodes: int, speeds: Mapping[str, Speed]) -> Problem:
        """Return the plan problem of a standing start on `nodes` nodes, at a system's speeds."""
        tasks = []
        for task in self.tasks:
            speed = speeds[task.name]
            least, most = speed.least(task.min_nodes), self.most(task) // speed.unit * speed.unit
            tasks.append(
                TaskProblem(
                    name=task.name,
                    weight=task.weight,
                    workers=0,
                    min_workers=least,
                    max_workers=most,
                    floor=least,
                    unit=speed.unit,
                    throughput=speed.flops,
                )
            )
        return Problem(nodes, 1_000_000, 0, tuple(tasks))

    def best_plan(self, nodes: int, speeds: Mapping[str, Speed] | None = None) -> dict[str, int]:
        """Return the nodes per task in the plan of greatest WAF on `nodes` nodes, from a standing start.

        `speeds`: a system's own, where they are not Megatron's."""
        return {task.name: count for task, count in solve(self.problem(nodes, speeds or self.speeds))}

    @cached_property
    def failure_free(self) -> Mapping[str, int]:
        """Compute F per task in the best plan of the whole cluster, weighted FLOP/s."""
        plan = self.best_plan(self.cluster.nodes)
        return {name: self.worth[name][count] for name, count in plan.items()}


def by_node(flops: Mapping[int, int], cluster: Cluster, most: int) -> tuple[int, ...]:
    """Convert FLOP/s by GPUs to T(0..most) by nodes: the most that any GPUs of so many nodes reach, the others idle."""
    curve = [0]
    for nodes in range(1, most + 1):
        gpu_counts = range((nodes - 1) * cluster.per_node + 1, nodes * cluster.per_node + 1)
        curve.append(max(curve[-1], *(flops.get(gpus, 0) for gpus in gpu_counts)))
    return tuple(curve)


@lru_cache(maxsize=256)
def _table(question: ThroughputQuery, gpus: int) -> dict[int, int]:
    return table(question, gpus)


def _speed(task: TrainingTask, cluster: Cluster) -> Speed:
    most = min(task.max_nodes or cluster.nodes, cluster.nodes)
    try:
        question = task.job(cluster)
        flops = by_node(_table(question, most * cluster.per_node), cluster, most)
    except ValueError as error:
        raise WorkloadError(f"task {task.name}: layout {task.layout}: {error}") from None
    if not any(flops):
        raise WorkloadError(f"task {task.name}: {task.model} does not fit on these GPUs; give more nodes")
    replica = (question.tp or 1) * (question.pp or 1)
    return Speed(flops, -(-replica // cluster.per_node))


# --- what people write ---------------------------------------------------------------------------

_CLUSTER = re.compile(r"(?P<gpu>[a-z0-9-]+):(?P<nodes>[0-9]{1,6})(x(?P<per_node>[0-9]{1,3}))?")

#: Six GPT-3 tasks for 16 nodes of 8 (assumed; the paper's own six are not known to us).
SIX = (
    TrainingTask(name="gpt-1b-a", model="gpt3-1.3b", weight=2.0),
    TrainingTask(name="gpt-1b-b", model="gpt3-1.3b", weight=1.0),
    TrainingTask(name="gpt-7b-a", model="gpt3-7b", weight=1.5),
    TrainingTask(name="gpt-7b-b", model="gpt3-7b", weight=1.0),
    TrainingTask(name="gpt-13b", model="gpt3-13b", weight=1.0),
    TrainingTask(name="gpt-70b", model="gpt3-70b", weight=1.0, min_nodes=4),
)


def parse_cluster(text: str) -> Cluster:
    """Parse `GPU:NODES[xGPUS]`, for example a800-80g:16x8. Raises WorkloadError."""
    match = _CLUSTER.fullmatch(text)
    if match is None:
        raise WorkloadError(f"--cluster {text!r}: give GPU:NODESxGPUS, for example a800-80g:16x8")
    if match["gpu"] not in GPUS:
        raise WorkloadError(f"--cluster: unknown GPU {match['gpu']!r}; {guess(match['gpu'], list(GPUS))}")
    cluster = Cluster(match["gpu"], int(match["nodes"]), int(match["per_node"] or GPUS[match["gpu"]].per_node))
    if not (cluster.nodes and cluster.per_node and cluster.gpus <= GPUS_MAX):
        raise WorkloadError(f"--cluster: {cluster.gpus} GPUs; give 1 to {GPUS_MAX}")
    return cluster


def six(copies: int = 1, layout: Literal["best", "fixed"] = "best") -> tuple[TrainingTask, ...]:
    """Return the six tasks, `copies` times. "fixed": 70B in replicas of four nodes (8 x 4), the others of one (8 x
    1)."""
    tasks = [
        msgspec.structs.replace(task, name=task.name if copies == 1 else f"{task.name}-{copy:03d}")
        for copy in range(copies)
        for task in SIX
    ]
    if layout == "fixed":
        forms = {"gpt3-70b": "8x4"}
        tasks = [msgspec.structs.replace(task, layout=forms.get(task.model, "8x1")) for task in tasks]
    return tuple(tasks)


def parse_tasks(text: str) -> tuple[TrainingTask, ...]:
    """Parse `six`, `six*N` (N copies), or the path of a YAML file: a list of TrainingTask. Raises WorkloadError."""
    copies = re.fullmatch(r"six(?:\*([0-9]{1,4}))?", text)
    if copies is not None:
        return six(_copies(int(copies[1] or 1)))
    path = Path(text)
    try:
        document = strict_yaml.parse(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"--tasks {text}: cannot be read ({error}); give six, six*N or a YAML file") from None
    except strict_yaml.BadYaml as error:
        raise WorkloadError(f"--tasks {path.name}: {error}") from None
    if not isinstance(document.value, list) or not document.value:
        raise WorkloadError(f"--tasks {path.name}: expected a list of tasks (- name: ...)")
    fault = next(faults(document.value, tuple[TrainingTask, ...]), None)
    if fault is not None:
        raise WorkloadError(f"--tasks {path.name}: line {document.lines.get(fault.place, 1)}: {fault}")
    tasks = msgspec.convert(document.value, tuple[TrainingTask, ...], strict=False)
    for task in tasks:
        if task.model not in MODELS:
            advice = guess(task.model, list(MODELS))
            raise WorkloadError(f"--tasks: {task.name}: unknown model {task.model!r}; {advice}")
        if sum(sibling.name == task.name for sibling in tasks) > 1:
            raise WorkloadError(f"--tasks: {task.name} appears twice; give each task its own name")
    return tasks


def _copies(copies: int) -> int:
    if not copies:
        raise WorkloadError("--tasks six*0: no tasks; give six*1 or more")
    return copies


def workload(cluster: Cluster, tasks: tuple[TrainingTask, ...]) -> Workload:
    """Combine both, checked: every floor can be met at once. Raises WorkloadError."""
    floors = sum(task.min_nodes for task in tasks)
    if floors > cluster.nodes:
        raise WorkloadError(
            f"--tasks: together they need at least {floors} nodes, the cluster has {cluster.nodes}; give more nodes"
        )
    result = Workload(cluster, tuple(_with_feasible_minimum(task, cluster) for task in tasks))
    assert result.throughput
    return result


def _with_feasible_minimum(task: TrainingTask, cluster: Cluster) -> TrainingTask:
    """Return the task with a minimum at which it fits into memory, in whole replicas."""
    speed = _speed(task, cluster)
    least = speed.least(task.min_nodes)
    if least > len(speed.flops) - 1:
        raise WorkloadError(f"task {task.name}: needs {least} nodes, may have {len(speed.flops) - 1}; raise max_nodes")
    return msgspec.structs.replace(task, min_nodes=least)
