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
from unicrond.core.tasks.task_validation import reshape_problem, task_problems
from unicrond.events import vocabulary as v
from unicrond.events.wire.codec import RESERVED_NAMES

#: Enrolled nodes, at most: as many as the event stream has room for consumers, and more than a cluster has nodes.
LOGINS_MAX = 65_536
#: Windows at a time, and nodes of one window, at most.
_WINDOWS_MAX = 1024
_WINDOW_NODES_MAX = 4096
#: A silence that nobody remembers hides the next trouble.
SILENCE_MAX_US = 30 * 86_400_000_000
#: Faults of a node; the others are a worker's. `kill` is either.
NODE_FAULTS = ("drop_network", "xid")


def request_problem(state: ClusterState, event: v.Request) -> str:
    """Return why `event` asks for what cannot be, as "field: what is wrong; the fix"; "" where nothing is wrong."""
    if isinstance(event, v.TaskSubmitted):
        return next(map(str, task_problems(event.spec, state)), "")
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
    if isinstance(event, v.AlarmSilenced):
        return silence_problem(event)
    return ""


def agent_mismatch(state: ClusterState, event: v.NodeCordoned | v.NodeUncordoned | v.ForgetRequested) -> str:
    """Return why the node is not the one that is meant; "" where it is, or where any is."""
    node = state.nodes.get(event.node)
    if node is None:
        return ""
    if event.agent_boot not in (0, node.agent.boot):
        return f"agent_boot: {event.node} has an agent of boot {node.agent.boot}, not {event.agent_boot}"
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


def silence_problem(event: v.AlarmSilenced) -> str:
    """Return why the alarm cannot be silenced for so long; "" where it can."""
    if not event.for_us:
        return "for_s: the silence would be over; give a longer one"
    if event.for_us > SILENCE_MAX_US:
        return "for_s: an alarm is silenced for 30 days at most; give a shorter time, or mend its cause"
    return ""


def enrolment_problem(state: ClusterState, event: v.NodeEnrolled) -> str:
    """Return why the key cannot be the node's; "" where it can."""
    if event.node in RESERVED_NAMES:
        return f"node: {event.node} is not a name for nodes; use another"
    if event.node not in state.logins and len(state.logins) >= LOGINS_MAX:
        return f"node: {LOGINS_MAX} nodes are enrolled; revoke those that are gone"
    owner = next((node for node, login in state.logins.items() if login.has_key(event.key)), event.node)
    return "" if owner == event.node else f"key: is the key of node {owner}; make another"


def update_problem(task: Task, request: v.TaskUpdated) -> str:
    """Return why the task cannot have these settings; "" where it can."""
    if not request.settings:
        return "settings: none is given; give weight, priority, preemptible, min_workers or max_workers"
    bounds = [name for name in ("min_workers", "max_workers") if name in request.settings]
    if bounds and task.reshaping.reshape is not None and not task.reshaping.plan:
        return f"{bounds[0]}: the reshape that is under way brings its own bounds; wait for its end"
    return next((str(fault) for fault in task_problems(replace(task.spec, **request.settings))), "")


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
