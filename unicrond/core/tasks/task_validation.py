"""Whether a task may run: all that is wrong with it, from its form to the tasks that run already. Pure.

Rules
-----
* One door: task files, the API, the log's admission, reshapes, what-if and replay ask here and nowhere else. What is
  wrong is said as "field: what is wrong; the fix".
* Its form (`form_problems`): of plain data, the right fields with values of the right types (state/field_faults.py).
* Its sense (task_rules.py): what no field's type says, most of it about several fields together.
* The disk, where a person waits for the answer (`is_file`): the entry script exists. Each machine sees another disk.
* The cluster (`state`): each node that may get its workers runs tasks as its user, and reaches the object store of its
  checkpoints.
* The tasks that run: its name is free (`name_conflict`); a running task may have the layout, the bounds and the rate
  that it is asked to have (`reshape_problem`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from unicrond.core.state.field_faults import FieldFault, faults
from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.core.tasks.reshaping import is_in_place, reshaped
from unicrond.core.tasks.task_rules import ENTRIES, spec_faults
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary import TaskSpec
from unicrond.events.vocabulary.shape import Shape
from unicrond.events.vocabulary.tasks import is_url


def form_problems(data: Any) -> list[FieldFault]:
    """Return all that keeps plain data from being a task's description."""
    return list(faults(data, TaskSpec))


def task_problems(
    spec: TaskSpec, state: ClusterState | None = None, is_file: Callable[[str], bool] | None = None
) -> list[FieldFault]:
    """Return all that keeps a well-typed task from being submitted, apart from its name being in use. `state`: the
    cluster that it would run on; `is_file`: says whether a path is a file here."""
    problems = list(spec_faults(spec))
    if is_file is not None and spec.entry not in ENTRIES and spec.entry.startswith("/") and not is_file(spec.entry):
        text = f"{spec.entry!r} is not a file; give {', '.join(ENTRIES)} or the path of a script"
        problems.append(FieldFault(("entry",), text))
    if state is not None:
        problems += _user_problems(state, spec)
    return problems


def name_conflict(state: ClusterState, name: str) -> str:
    """Return why no new task can have the name yet, "" where one can: once the last one of that name has ended and is
    at rest."""
    previous = state.tasks.get(name)
    if previous is None or (previous.status is not TaskStatus.ACTIVE and previous.at_rest):
        return ""
    return f"name: task {name} already exists; choose another name, or cancel it first"


def _user_problems(state: ClusterState, spec: TaskSpec) -> Iterator[FieldFault]:
    """Yield why the task cannot run as the user that it names: workers may go to any node that is up."""
    refusing = [node for node in state.nodes.values() if node.schedulable and spec.run_as not in ("", *node.users)]
    if not refusing:
        return
    node, more = refusing[0], f" and {len(refusing) - 1} more" if len(refusing) > 1 else ""
    allowed = f"allows {', '.join(node.users)}" if node.users else "runs all tasks as its agent's user"
    text = f"node {node.name}{more} does not run tasks as {spec.run_as} ({allowed}); add it to --run-as there"
    yield FieldFault(("run_as",), text)


def storage_problems(spec: TaskSpec, state: ClusterState) -> Iterator[FieldFault]:
    """Yield why a new task's workers could not write its checkpoints: a node that may have new ones cannot reach the
    object store. To be asked at submit; a task that the log has taken runs on."""
    scheme = spec.checkpoint.dir.partition("://")[0] if is_url(spec.checkpoint.dir) else ""
    nodes = [node for node in state.nodes.values() if node.schedulable and not node.cordon.active]
    refusing = [node for node in nodes if scheme not in ("", *node.object_stores)]
    if not refusing:
        return
    node, more = refusing[0], f" and {len(refusing) - 1} more" if len(refusing) > 1 else ""
    fix = "install unicrond[object-store] there, no older than the head's, and restart its agent; or cordon the node"
    yield FieldFault(("checkpoint", "dir"), f"node {node.name}{more} cannot write to {scheme}://; {fix}")


# --- a running task --------------------------------------------------------------------------------


def reshape_problem(state: ClusterState, task: Task, request: v.ReshapeRequested) -> str:
    """Return why the task cannot be reshaped so; "" where it can.

    Room is in all slots of nodes that may have new workers: the planner can move those of other tasks. A task that
    keeps its layout and asks for no more workers than before needs none: nothing gets worse by that.
    """
    if request.lr is not None and task.spec.entry not in ENTRIES:
        return "lr: only the script knows its learning rate; change it there and submit the task again"
    if request.iterations is not None and "--train-samples" in task.spec.args:
        return "iterations: the task counts samples (--train-samples in args); cancel it and submit it again"
    needs_room = not is_in_place(task.spec, request) or request.min_workers > task.spec.min_workers
    stages = 0
    if needs_room:
        # The tp workers of a stage stand on one node (placement.py).
        slots = [node.slots for node in state.nodes.values() if node.schedulable and not node.cordon.active]
        largest = max(slots, default=0)
        if request.tp > largest:
            return (
                f"tp: {request.tp} workers of a stage share a node, and no node has more than {largest} slots; lower it"
            )
        stages = sum(count // request.tp for count in slots)
        if request.pp > stages:
            return (
                f"pp: the nodes have room for {stages} stages of tp {request.tp}, not for {request.pp}; lower it, or tp"
            )
        if (groups := request.shape.groups) > stages:
            return f"cp, ep: the nodes have room for {stages} groups of tp {request.tp}, not for {groups}; lower them"
    if problem := _micro_batch_problem(task.spec, request.shape):
        return problem
    for fault in task_problems(reshaped(task.spec, request)):
        return str(fault)
    if needs_room and request.min_workers > (room := stages // request.shape.groups * request.shape.workers):
        return f"min_workers: the nodes have room for {room}; lower it"
    return ""


def _micro_batch_problem(spec: TaskSpec, shape: Shape) -> str:
    """Return why micro-batches cannot have so many samples, "" where they can: a reshape changes neither the global
    batch nor the lanes."""
    micro_batch = (shape.micro_batch or spec.micro_batch) * shape.data
    if micro_batch == spec.replica_batch:
        return ""
    name = "micro_batch" if shape.data == 1 else "micro_batch, times the data-parallel ranks in a replica"
    if spec.global_batch % micro_batch:
        return f"{name}: {micro_batch} does not divide global_batch ({spec.global_batch}); use a divisor of it"
    if spec.lanes > (micro_batches := spec.global_batch // micro_batch):
        most = spec.global_batch // spec.lanes
        return (
            f"{name}: {micro_batches} of {micro_batch} samples do not fill the task's {spec.lanes} lanes;"
            f" use at most {most}"
        )
    return ""
