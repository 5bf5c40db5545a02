"""What-if plans: pure questions to the planner that change nothing.

`table_of` makes the one-step table, and `foreseen` reads it: what each next event would lead to. `what_if` changes the
state as a person says (nodes lost or added, tasks weighed otherwise), and plans for that with the coordinator's own
rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from unicrond.core.deciding.plans import FLOPS_MAX, build_plan
from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning.situation import NextEvent, NodeArrival, NodeLoss, TaskEnd, TaskLaunch, WorkerLoss
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Planner, PlanTable
from unicrond.core.rules.plan_problems import healthy_problem_of, problem_of, situation_of
from unicrond.core.rules.survey import Survey
from unicrond.core.state.field_faults import faults
from unicrond.core.state.node_parts import AgentIdentity
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, Node, NodeStatus, TaskStatus
from unicrond.core.tasks.task_validation import task_problems
from unicrond.events.vocabulary import Gpu, Name, PlanAdopted, StoreAddress
from unicrond.events.vocabulary.phrases import guess

#: More nodes than any question needs; a planner's row has one entry per worker.
NODES_MAX = 10_000
#: Workers times tasks from which on the compiled kernel is worth its loading (a second, 100 MB).
WARM_FROM = 1000


class WhatIfError(ValueError):
    """A change that cannot be made; the message names the field and the fix."""


class TaskChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a task that change; None: as they are."""

    weight: float | None = None
    min_workers: int | None = None
    max_workers: int | None = None


class ClusterChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lose`: nodes. `add_nodes`: how many, of `slots` each (0: as most nodes have), with GPUs of type `gpu` ("": as
    most nodes have). `tasks`: by name."""

    lose: tuple[Name, ...] = ()
    add_nodes: Annotated[int, Meta(ge=0, le=NODES_MAX)] = 0
    slots: Annotated[int, Meta(ge=0, le=NODES_MAX)] = 0
    tasks: dict[Name, TaskChange] = {}
    gpu: Gpu = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one next event would lead to. `nodes`: further nodes whose loss would lead to the same.

    `workers`: per task that would be there. `waf`: weighted FLOP/s of that, as far as all find a seat. `layouts`: of
    the tasks that have a choice and would have workers, "tp 2, pp 1". `gpus`: of tasks that would have workers, the
    type of GPU, where there are several.
    """

    event: str
    subject: str
    workers: dict[str, int]
    waf: int
    reason: str
    nodes: tuple[str, ...] = ()
    layouts: dict[str, str] = {}
    gpus: dict[str, str] = {}


_WORDS: dict[type, str] = {
    WorkerLoss: "slot lost",
    NodeLoss: "node lost",
    NodeArrival: "node joins",
    TaskEnd: "task ends",
    TaskLaunch: "task launched",
}


def table_of(survey: Survey, planner: Planner) -> PlanTable | None:
    """Return the one-step table of a state; None while the last event has not been planned for. Raise ProblemError.

    May load the compiled kernel first: not for an event loop.
    """
    situation = situation_of(survey)
    if situation is None:
        return None
    if situation.workers * len(situation.tasks) >= WARM_FROM:
        kernel.warm()
    return planner.refresh(situation)


def foreseen(table: PlanTable) -> list[Row]:
    """Return one outcome per event that the table answers; nodes whose loss means the same share one. With several
    types of GPU some may not be planned for (`unforeseen`)."""
    rows: list[Row] = []
    alike: dict[object, list[str]] = {}
    for node in table.situation.nodes:
        alike.setdefault(node.load, []).append(node.name)
    for event in table.situation.expected(distinct=True):
        solution = table.solution(event)
        if solution is None:
            continue
        equivalents: tuple[str, ...] = ()
        if isinstance(event, NodeLoss):
            group = alike[table.situation.load_of[event.node].load]
            event, equivalents = NodeLoss(group[0]), tuple(group[1:])
        rows.append(
            Row(
                event=_WORDS[type(event)],
                subject=_subject(event),
                workers={task.name: workers for task, workers in solution},
                waf=min(solution.waf, FLOPS_MAX),
                reason=solution.reason,
                nodes=equivalents,
                layouts={
                    task.name: str(shape)
                    for (task, workers), shape in zip(solution, solution.shapes, strict=True)
                    if task.alternatives
                    and workers
                    and len({task.shape, *(alternative.shape for alternative in task.alternatives)}) > 1
                },
                gpus={t.name: gpu for (t, k), gpu in zip(solution, solution.gpus, strict=True) if k and gpu},
            )
        )
    return rows


def unforeseen(table: PlanTable) -> int:
    """Count the next events that have no plan in the table, or none yet; nodes whose loss means the same count once."""
    expected = table.situation.expected(distinct=True) if table.situation.gpus else ()
    return sum(table.solution(event) is None for event in expected)


def table_json(table: PlanTable) -> dict[str, Any]:
    """Return what is shown of a table."""
    return {"rows": foreseen(table), "unforeseen": unforeseen(table)}


def _subject(event: NextEvent) -> str:
    match event:
        case NodeLoss(node):
            return node
        case NodeArrival(slots, gpu):
            return f"{slots} slot{'s' if slots != 1 else ''}{f' of {gpu}' if gpu else ''}"
        case WorkerLoss(task) | TaskEnd(task) | TaskLaunch(task):
            return task


def changes_of(value: Any) -> ClusterChanges:
    """Read the changes that JSON states. Raise WhatIfError."""
    for fault in faults(value, ClusterChanges):
        raise WhatIfError(str(fault))
    return msgspec.convert(value, ClusterChanges, strict=True)


def what_if(state: ClusterState, policy: Policy, changes: ClusterChanges) -> PlanAdopted:
    """Return the plan that the coordinator would adopt now, were the cluster so. Raise WhatIfError. Takes a plan's
    time."""
    survey = Survey(with_changes(state, changes), policy)
    solutions = {problem: solve(problem) for problem in (problem_of(survey), healthy_problem_of(survey))}
    plan = build_plan(survey, solutions)
    assert plan is not None
    return plan


def with_changes(state: ClusterState, changes: ClusterChanges) -> ClusterState:
    """Return the state with the changes made. Raise WhatIfError."""
    nodes = dict(state.nodes)
    for name in changes.lose:
        node = nodes.get(name)
        if node is None or node.status is not NodeStatus.UP:
            up = [node.name for node in state.nodes.values() if node.status is NodeStatus.UP]
            raise WhatIfError(f"lose: {name} is not a node that is up; {guess(name, up)}")
        nodes[name] = replace(node, status=NodeStatus.LOST)
    slots = changes.slots or _usual_slots(state.nodes)
    if changes.add_nodes and not slots:
        raise WhatIfError("slots: no node to take the number of slots from; give --slots")
    added = 0
    while added < changes.add_nodes:
        name = f"new-{len(nodes) + 1}"
        nodes[name] = _new_node(name, slots, changes.gpu or _usual_gpu(state.nodes), state.now_us)
        added += 1
    tasks = dict(state.tasks)
    for name, change in changes.tasks.items():
        task = tasks.get(name)
        if task is None or task.status is not TaskStatus.ACTIVE:
            raise WhatIfError(f"tasks.{name}: is not active; {guess(name, [t.name for t in state.active])}")
        values = {field: value for field, value in msgspec.structs.asdict(change).items() if value is not None}
        try:
            spec = msgspec.convert(msgspec.to_builtins(task.spec) | values, type(task.spec))
        except msgspec.ValidationError as error:
            field = str(error).rpartition("`$.")[2].rstrip("`")
            raise WhatIfError(f"tasks.{name}.{field}: {str(error).partition(' - at')[0]}") from None
        wrong = [str(fault) for fault in task_problems(spec) if fault.place and fault.place[0] in values]
        if wrong:
            raise WhatIfError(f"tasks.{name}.{wrong[0]}")
        tasks[name] = replace(task, spec=spec)
    return replace(state, nodes=nodes, tasks=tasks)


def _usual_slots(nodes: Mapping[str, Node]) -> int:
    """Return the slots that most nodes have; the larger of two as frequent."""
    slots = [node.slots for node in nodes.values() if node.status is not NodeStatus.LEFT]
    return max(slots, key=lambda count: (slots.count(count), count), default=0)


def _usual_gpu(nodes: Mapping[str, Node]) -> str:
    """Return the type of GPU that most nodes have; the first by name of two as frequent."""
    types = Counter(node.gpu for node in nodes.values() if node.status is not NodeStatus.LEFT)
    return min(types, key=lambda gpu: (-types[gpu], gpu), default="")


def _new_node(name: str, slots: int, gpu: str, now_us: int) -> Node:
    return Node(
        name=name,
        status=NodeStatus.UP,
        slots=slots,
        slots_max=slots,
        address="",
        store=StoreAddress(host="", port=0),
        agent=AgentIdentity(boot=0),
        joined_us=now_us + 1,
        gpu=gpu,
    )
