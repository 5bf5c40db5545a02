"""The plan for each event that may come next, as it is shown: `table_of` makes the one-step table, `foreseen` reads it.

Pure. The plan for a cluster that a person describes is in what_if.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unicrond.core.deciding.plans import FLOPS_MAX
from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning.situation import NextEvent, NodeArrival, NodeLoss, TaskEnd, TaskLaunch, WorkerLoss
from unicrond.core.planning.table import Planner, PlanTable
from unicrond.core.rules.plan_problems import situation_of
from unicrond.core.rules.survey import Survey

#: Workers times tasks from which on the compiled kernel is worth its loading (a second, 100 MB).
WARM_FROM = 1000


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
