"""What a request may not ask for: one set of rules, wherever it comes from. Pure.

Rules
-----
* The API refuses with these words (400); the fold quarantines with them what stands in the log all the same
  (`admission.py`), so no request gets past them by another way.
* What only meets the wrong moment (a task that is not active, a node that is away) is not a breach: it changes nothing,
  and the API says so by itself (404, 409).
"""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.core.tasks.reshaping import is_in_place, reshaped
from unicrond.core.tasks.task_rules import ENTRIES, spec_faults
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary import TaskSpec
from unicrond.events.wire.codec import RESERVED_NAMES

#: Enrolled nodes, at most: as many as the event stream has room for consumers, and more than a cluster has nodes.
LOGINS_MAX = 65_536
#: Windows at a time, and nodes of one window, at most.
_WINDOWS_MAX = 1024
_WINDOW_NODES_MAX = 4096
#: Faults of a node; the others are a worker's. `kill` is either.
NODE_FAULTS = ("drop_network", "xid")


def request_problem(state: ClusterState, event: v.Request) -> str:
    """Return why `event` asks for what cannot be, as "field: what is wrong; the fix"; "" where nothing is wrong."""
    if isinstance(event, v.TaskSubmitted):
        return next((str(fault) for fault in spec_faults(event.spec)), "") or user_problem(state, event.spec)
    if isinstance(event, v.ReshapeRequested):
        task = state.tasks.get(event.task)
        return reshape_problem(state, task, event) if task and task.status is TaskStatus.ACTIVE else ""
    if isinstance(event, v.TaskUpdated):
        task = state.tasks.get(event.task)
        return update_problem(task, event) if task and task.status is TaskStatus.ACTIVE else ""
    if isinstance(event, v.InjectionRequested):
        return fault_problem(event.fault)
    if isinstance(event, v.NodeEnrolled):
        return enrolment_problem(state, event)
    if isinstance(event, v.MaintenancePlanned):
        return maintenance_problem(state, event)
    return ""


def agent_mismatch(state: ClusterState, event: v.NodeCordoned | v.NodeUncordoned | v.ForgetRequested) -> str:
    """Return why the node is not the one that is meant; "" where it is, or where any is."""
    node = state.nodes.get(event.node)
    if node is None:
        return ""
    if event.agent_boot not in (0, node.agent_boot):
        return f"agent_boot: {event.node} has an agent of boot {node.agent_boot}, not {event.agent_boot}"
    if event.address not in ("", node.address):
        return f"address: {event.node} is at {node.address}, not at {event.address}"
    return ""


def maintenance_problem(state: ClusterState, event: v.MaintenancePlanned) -> str:
    """Return why the window cannot be planned; "" where it can."""
    if not 0 < len(event.nodes) <= _WINDOW_NODES_MAX:
        return f"nodes: a window has 1 to {_WINDOW_NODES_MAX} nodes; give several windows"
    if event.until_us <= event.from_us:
        return "for: a window takes longer than nothing; give a duration"
    if event.until_us <= state.now_us:
        return "from: the window would be over; give another time"
    if len(state.windows) >= _WINDOWS_MAX:
        return f"maintenance: {_WINDOWS_MAX} windows are planned; cancel some"
    return ""


def user_problem(state: ClusterState, spec: TaskSpec) -> str:
    """Return why the task cannot run as the user that it names, "" where it can: workers may go to any node that is
    up."""
    refusing = [node for node in state.nodes.values() if node.schedulable and spec.run_as not in ("", *node.users)]
    if not refusing:
        return ""
    node, more = refusing[0], f" and {len(refusing) - 1} more" if len(refusing) > 1 else ""
    allowed = f"allows {', '.join(node.users)}" if node.users else "runs all tasks as its agent's user"
    return f"run_as: node {node.name}{more} does not run tasks as {spec.run_as} ({allowed}); add it to --run-as there"


def enrolment_problem(state: ClusterState, event: v.NodeEnrolled) -> str:
    """Return why the key cannot be the node's; "" where it can."""
    if event.node in RESERVED_NAMES:
        return f"node: {event.node} is not a name for nodes; use another"
    if event.node not in state.logins and len(state.logins) >= LOGINS_MAX:
        return f"node: {LOGINS_MAX} nodes are enrolled; revoke those that are gone"
    owner = next((node for node, login in state.logins.items() if login.key == event.key), event.node)
    return "" if owner == event.node else f"key: is the key of node {owner}; make another"


def update_problem(task: Task, request: v.TaskUpdated) -> str:
    """Return why the task cannot have these settings; "" where it can."""
    if not request.settings:
        return "settings: none is given; give weight, priority, preemptible, min_workers or max_workers"
    return next((str(fault) for fault in spec_faults(replace(task.spec, **request.settings))), "")


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
        slots = [node.slots for node in state.nodes.values() if node.schedulable and not node.cordoned]
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
    if problem := _micro_batch_problem(task.spec, request.micro_batch):
        return problem
    for fault in spec_faults(reshaped(task.spec, request)):
        return str(fault)
    if needs_room and request.min_workers > (room := stages // request.pp * request.pp * request.tp):
        return f"min_workers: the nodes have room for {room}; lower it"
    return ""


def _micro_batch_problem(spec: TaskSpec, micro_batch: int) -> str:
    """Return why micro-batches cannot have so many samples, "" where they can: a reshape changes neither the global
    batch nor the lanes."""
    if not micro_batch or micro_batch == spec.micro_batch:
        return ""
    if spec.global_batch % micro_batch:
        return f"micro_batch: {micro_batch} does not divide global_batch ({spec.global_batch}); use a divisor of it"
    if spec.lanes > (micro_batches := spec.global_batch // micro_batch):
        most = spec.global_batch // spec.lanes
        return (
            f"micro_batch: {micro_batches} of {micro_batch} samples do not fill the task's {spec.lanes} lanes;"
            f" use at most {most}"
        )
    return ""


def fault_problem(fault: v.Fault) -> str:
    """Return why the fault cannot happen as it is described; "" where it can."""
    is_of_node = fault.kind in NODE_FAULTS or (fault.kind == "kill" and not fault.worker)
    if not fault.worker and not is_of_node:
        return f"task: {fault.kind} is a worker's fault; give --task (and --rank)"
    if is_of_node and (fault.at_iteration or fault.phase):
        return "at_iteration: a node's fault happens at once; leave --at-iteration and --phase out"
    if fault.kind == "slow" and not fault.seconds:
        return "seconds: slow needs the delay of each iteration; give --seconds 0.5"
    if fault.seconds and fault.kind not in ("slow", "drop_network"):
        return f"seconds: {fault.kind} has no length; leave --seconds out"
    if (fault.kind == "xid") != bool(fault.xid):
        return "xid: give --xid CODE with the fault xid, and with no other"
    return ""
