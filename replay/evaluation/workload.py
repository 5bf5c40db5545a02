"""What a simulated cluster is and what it trains: nodes, tasks, and one table T(t, x) that every policy shares.

The unit is the node: a policy gives a task whole nodes, T(t, x) is the achieved FLOP/s on x of them, in the
best layout that `unicrond.throughput.model` finds, idle GPUs allowed (so it never falls with x). That a
task may take another tp x pp at another x is the paper's assumption; `layout = fixed` keeps one per task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from events.guess import guess
from events.vocabulary import Name
from unicrond.core.field_faults import faults
from unicrond.core.planning.problem import Problem, TaskProblem
from unicrond.core.planning.solver import solve
from unicrond.intake import strict_yaml
from unicrond.throughput.layouts import job
from unicrond.throughput.model import table
from unicrond.throughput.presets import GPUS, MODELS

GPUS_MAX = 16384


class WorkloadError(ValueError):
    """A cluster or a list of tasks that cannot be; one line that names the field and the fix."""


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `per_node` GPUs of one kind."""

    gpu: str
    nodes: int
    per_node: int = 8

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.nodes * self.per_node


class TrainingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task. `min_nodes`: worth nothing on fewer, and its floor. `max_nodes`: 0 = as many as there are.

    `layout`: "best" at each number of nodes, or "8x2" (tp x pp) for good.
    """

    name: Name
    model: str
    weight: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    min_nodes: Annotated[int, Meta(ge=1)] = 1
    max_nodes: Annotated[int, Meta(ge=0)] = 0
    layout: Annotated[str, Meta(pattern=r"^(best|[0-9]{1,3}x[0-9]{1,3})\Z")] = "best"


@dataclass(frozen=True)
class Workload:
    """A cluster and its tasks."""

    cluster: Cluster
    tasks: tuple[TrainingTask, ...]

    @cached_property
    def throughput(self) -> Mapping[str, tuple[int, ...]]:
        """T(0..n) per task, FLOP/s on so many nodes; never falling."""
        return {task.name: _curve(task, self.cluster) for task in self.tasks}

    @cached_property
    def worth(self) -> Mapping[str, tuple[int, ...]]:
        """F(0..n) = weight * T per task, and 0 below its minimum; weighted FLOP/s."""
        return {
            task.name: tuple(
                int(task.weight * flops) if nodes >= task.min_nodes else 0
                for nodes, flops in enumerate(self.throughput[task.name])
            )
            for task in self.tasks
        }

    @cached_property
    def units(self) -> Mapping[str, int]:
        """Nodes in one replica: 1 where the layout is free or fits a node."""
        return {task.name: _unit(task, self.cluster) for task in self.tasks}

    def most(self, task: TrainingTask) -> int:
        """The most nodes that the task may have."""
        return min(task.max_nodes or self.cluster.nodes, self.cluster.nodes)

    def best_plan(self, nodes: int) -> dict[str, int]:
        """Nodes per task in the plan of greatest WAF on `nodes` nodes, from a standing start."""
        tasks = tuple(
            TaskProblem(
                name=task.name,
                weight=task.weight,
                workers=0,
                min_workers=task.min_nodes,
                max_workers=self.most(task),
                floor=task.min_nodes,
                unit=self.units[task.name],
                throughput=self.throughput[task.name],
            )
            for task in self.tasks
        )
        solution = solve(Problem(nodes, 1_000_000, 0, tasks))
        return {task.name: count for task, count in solution}

    @cached_property
    def failure_free(self) -> Mapping[str, int]:
        """F per task in the best plan of the whole cluster, weighted FLOP/s."""
        plan = self.best_plan(self.cluster.nodes)
        return {name: self.worth[name][count] for name, count in plan.items()}


def _unit(task: TrainingTask, cluster: Cluster) -> int:
    if task.layout == "best":
        return 1
    tp, pp = map(int, task.layout.split("x"))
    return -(-tp * pp // cluster.per_node)


@lru_cache(maxsize=256)
def _table(model: str, gpu: str, gpus: int, layout: str) -> dict[int, int]:
    if layout == "best":
        return table(job(MODELS[model], GPUS[gpu]), gpus)
    tp, pp = map(int, layout.split("x"))
    return table(job(MODELS[model], GPUS[gpu], tp=tp, pp=pp), gpus)


def _curve(task: TrainingTask, cluster: Cluster) -> tuple[int, ...]:
    try:
        flops = _table(task.model, cluster.gpu, cluster.gpus, task.layout)
    except ValueError as error:
        raise WorkloadError(f"task {task.name}: layout {task.layout}: {error}") from None
    most = min(task.max_nodes or cluster.nodes, cluster.nodes)
    curve = [0]
    for gpus in range(1, cluster.gpus + 1):
        if gpus % cluster.per_node == 1 or cluster.per_node == 1:
            curve.append(curve[-1])
        curve[-1] = max(curve[-1], flops.get(gpus, 0))
    if not any(curve):
        raise WorkloadError(f"task {task.name}: {task.model} does not fit on these GPUs; give more nodes")
    return tuple(curve[: most + 1])


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
    """`GPU:NODES[xGPUS]`, for example a800-80g:16x8. Raises WorkloadError."""
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
    """The six tasks, `copies` times. "fixed": 70B in replicas of four nodes (8 x 4), the others of one (8 x 1)."""
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
    """`six`, `six*N` (N copies), or the path of a YAML file: a list of TrainingTask. Raises WorkloadError."""
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
    wrong = next(faults(document.value, tuple[TrainingTask, ...]), None)
    if wrong is not None:
        raise WorkloadError(f"--tasks {path.name}: line {document.lines.get(wrong.place, 1)}: {wrong}")
    tasks = msgspec.convert(document.value, tuple[TrainingTask, ...], strict=False)
    for task in tasks:
        if task.model not in MODELS:
            known = guess(task.model, list(MODELS))
            raise WorkloadError(f"--tasks: {task.name}: unknown model {task.model!r}; {known}")
        if sum(other.name == task.name for other in tasks) > 1:
            raise WorkloadError(f"--tasks: {task.name} appears twice; give each task its own name")
    return tasks


def _copies(copies: int) -> int:
    if not copies:
        raise WorkloadError("--tasks six*0: no tasks; give six*1 or more")
    return copies


def workload(cluster: Cluster, tasks: tuple[TrainingTask, ...]) -> Workload:
    """Both together, checked: every floor can be met at once. Raises WorkloadError."""
    floors = sum(task.min_nodes for task in tasks)
    if floors > cluster.nodes:
        raise WorkloadError(
            f"--tasks: together they need at least {floors} nodes, the cluster has {cluster.nodes}; give more nodes"
        )
    made = Workload(cluster, tuple(_with_feasible_minimum(task, cluster) for task in tasks))
    assert made.throughput
    return made


def _with_feasible_minimum(task: TrainingTask, cluster: Cluster) -> TrainingTask:
    """The task with a minimum at which it fits into memory, in whole replicas."""
    curve, unit = _curve(task, cluster), _unit(task, cluster)
    feasible = next((nodes for nodes, flops in enumerate(curve) if flops), len(curve))
    least = -(-max(task.min_nodes, feasible) // unit) * unit
    if least > len(curve) - 1:
        raise WorkloadError(f"task {task.name}: needs {least} nodes, may have {len(curve) - 1}; raise max_nodes")
    return msgspec.structs.replace(task, min_nodes=least)
