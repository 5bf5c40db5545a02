"""A person's order to reshape a running task, made exact: defaults for fields left out, refusals. Pure.

Rules
-----
* What is not given stays as it is; vpp and ep come as near to that as the new tp and pp allow. Bounds on workers that
  are not given come to whole replicas of the new layout.
* What cannot be is refused in one line: a model that does not divide so, a stage that no node has room for, a least
  number of workers that the nodes have no room for: all would end, and none could begin.
* Room is in all slots of nodes that may have new workers: the planner can move those of other tasks. A task that keeps
  its layout and asks for no more workers than before needs none: nothing gets worse by that.
"""

from __future__ import annotations

import msgspec

from unicrond.core.rules.fault_targets import OrderRefused
from unicrond.core.state.state import ClusterState, Task
from unicrond.core.tasks.reshaping import changes_nothing
from unicrond.core.tasks.task_rules import nearest, with_degrees
from unicrond.core.tasks.task_validation import reshape_problem
from unicrond.events.vocabulary import FirstIteration, LearningRate, ReshapeRequested, SomeWorkers, TaskSpec, Text
from unicrond.events.vocabulary.shape import Shape


class ReshapeOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/tasks/NAME/reshape. None: not given."""

    tp: SomeWorkers | None = None
    pp: SomeWorkers | None = None
    vpp: SomeWorkers | None = None
    ep: SomeWorkers | None = None
    cp: SomeWorkers | None = None
    etp: SomeWorkers | None = None
    micro_batch: SomeWorkers | None = None
    min_workers: SomeWorkers | None = None
    max_workers: SomeWorkers | None = None
    iterations: FirstIteration | None = None
    lr: LearningRate | None = None
    reason: Text = ""


def reshape_request(state: ClusterState, task: Task, order: ReshapeOrder) -> ReshapeRequested:
    """Return the event that asks for the reshape. Raise OrderRefused."""
    spec = task.spec
    near = nearest(spec, order.tp or spec.tp, order.pp or spec.pp)
    shape = with_degrees(near, {name: getattr(order, name) or 0 for name in Shape._fields})
    least, most = bounds(spec, shape)
    request = ReshapeRequested(
        task=task.name,
        **shape._asdict(),
        min_workers=order.min_workers or least,
        max_workers=order.max_workers or most,
        reason=order.reason or "requested by an operator",
        iterations=order.iterations,
        lr=order.lr,
    )
    problem = reshape_problem(state, task, request)
    if problem:
        raise OrderRefused(400, problem)
    if order.iterations is not None and order.iterations <= task.progress.iteration:
        committed = task.progress.iteration
        raise OrderRefused(409, f"iterations: {committed} are committed already; give more, or cancel the task")
    if changes_nothing(spec, request) and task.reshaping.reshape is None:
        if order.iterations or order.lr:
            raise OrderRefused(409, f"iterations, lr: task {task.name} has these already; give others")
        raise OrderRefused(409, f"tp, pp: task {task.name} has {shape.cut} and these bounds already; give others")
    return request


def bounds(spec: TaskSpec, shape: Shape) -> tuple[int, int]:
    """Return the min_workers and max_workers that come nearest to the present ones, in whole replicas, of which there
    are at least one and no more than micro-batches."""
    unit = shape.workers
    micro_batches = spec.micro_batches_in(shape)
    most = max(1, min(spec.max_workers // unit, micro_batches))
    least = min(most, -(-spec.min_workers // unit))
    return least * unit, most * unit
