"""What a person asks of a running task's layout, made exact: fields left out, and what cannot be. Pure.

Rules
-----
* What is not given stays as it is; bounds on workers that are not given come to whole replicas of the new tp * pp.
* What cannot be is refused in one line: a model that does not divide so, a stage that no node has room for.
"""

from __future__ import annotations

import msgspec

from events.vocabulary import Positive, ReshapeRequested, TaskSpec, Text
from unicrond.ordering import Refused
from unicrond.reshaping import changes_nothing, reshaped
from unicrond.state import ClusterState, NodeStatus, Task
from unicrond.task_file import problems


class ReshapeOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/tasks/NAME/reshape. None: not given."""

    tp: Positive | None = None
    pp: Positive | None = None
    min_workers: Positive | None = None
    max_workers: Positive | None = None
    reason: Text = ""


def asked_for(state: ClusterState, task: Task, order: ReshapeOrder) -> ReshapeRequested:
    """The event that asks for it. Raises Refused."""
    spec = task.spec
    tp, pp = order.tp or spec.tp, order.pp or spec.pp
    _require_room(state, tp, pp)
    least, most = bounds(spec, tp, pp)
    asked = ReshapeRequested(
        task=task.name,
        tp=tp,
        pp=pp,
        min_workers=order.min_workers or least,
        max_workers=order.max_workers or most,
        reason=order.reason or "asked by a person",
    )
    for problem in problems(reshaped(spec, asked)):
        raise Refused(400, problem)
    if changes_nothing(spec, asked) and task.reshape is None:
        raise Refused(409, f"tp, pp: task {task.name} has tp {tp}, pp {pp} and these bounds already; ask for others")
    return asked


def bounds(spec: TaskSpec, tp: int, pp: int) -> tuple[int, int]:
    """min_workers and max_workers that come nearest to the present ones, in whole replicas of tp * pp, of which there
    are at least one and no more than micro-batches."""
    unit = tp * pp
    most = max(1, min(spec.max_workers // unit, spec.micro_batches))
    least = min(most, -(-spec.min_workers // unit))
    return least * unit, most * unit


def _require_room(state: ClusterState, tp: int, pp: int) -> None:
    """One replica has a place: the tp workers of a stage stand on one node (placement.py)."""
    slots = [node.slots for node in state.nodes.values() if node.status is not NodeStatus.LEFT]
    largest = max(slots, default=0)
    if tp > largest:
        raise Refused(
            400, f"tp: {tp} workers of a stage share a node, and none has more than {largest} slots; lower it"
        )
    stages = sum(each // tp for each in slots)
    if pp > stages:
        raise Refused(400, f"pp: the nodes have room for {stages} stages of tp {tp}, not for {pp}; lower it, or tp")
