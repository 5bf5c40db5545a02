"""Notices for people, by rules over the log: pure.

| rule | sent when |
|---|---|
| `task_failed` | a task has failed |
| `crash_looping` | a task's program has failed for the second time since it was calm; once until it is calm again |
| `diverged` | a task's program trains something else on each replica, or each time; its replicas compute on others |
| `local_fault` | a task's program has failed on one node alone, and trains elsewhere; once until that is forgotten |
| `sev1` | an incident is of SEV1, or has become so |
| `isolated` | a node has been isolated |
| `no_progress` | a task that has workers in the plan has committed nothing for `no_progress_s` |
| `trouble` | the log takes nothing, deciding has stopped, or an alarm stands (the lines of `unicronctl status`) |
| `takeover` | a coordinator has taken over from another |
| `no_spare` | the last free slot is in use, while the plan lacks workers that a healthy cluster would have |
| `link` | nothing passes between two nodes, or it takes long, by both nodes' word |
| `held` | a decision is held by a brake: a person is needed; and when that is over |
| `refused` | an isolated node has failed its health check or its repair |

Rules
-----
* A notice has a key: notices under one key are about one matter. Those of an incident share its id, so that they are
  sent together. `is_over`: the matter of that key is settled. `alarm`: its key, where the matter is an
  alarm: while that is acknowledged or silenced, nobody is told (core/state/alarms.py).
* `step_notices` looks at one step, `standing` at what holds at a moment: a level, sent once until it is over;
  `taken_over` at a coordinator's beginning.

What does not live here: who gets them and how often (service/export/notifier.py,
service/export/notification_transports.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

from unicrond.core.faults import links
from unicrond.core.faults.program_faults import diverging_text, is_looping, looping_text
from unicrond.core.faults.severity import RESPONSE
from unicrond.core.nodes import brakes
from unicrond.core.replayer import LogStep
from unicrond.core.state.ordered_map import changed
from unicrond.core.state.state import ClusterState, Incident, NodeStatus, Severity, Task, TaskStatus
from unicrond.events import vocabulary as v

Rule: TypeAlias = Literal[
    "task_failed",
    "crash_looping",
    "diverged",
    "local_fault",
    "sev1",
    "isolated",
    "no_progress",
    "trouble",
    "takeover",
    "no_spare",
    "link",
    "held",
    "refused",
]
Urgency: TypeAlias = Literal["critical", "error", "warning", "info"]


class Notice(NamedTuple):
    """Something to tell people. `text`: what is known, some lines. `commands`: those that help next."""

    key: str
    rule: Rule
    urgency: Urgency
    title: str
    text: str = ""
    commands: tuple[str, ...] = ()
    is_over: bool = False
    alarm: str = ""


def step_notices(step: LogStep) -> list[Notice]:
    """Return the notices that a step gives rise to."""
    before, _, after = step
    event = step.event
    notices = [*_incident_notices(before, after), *_crash_notices(before, after), *_link_notices(before, after)]
    match event:
        case v.TaskFailed() if _has_failed(before, after, event.task):
            commands = "unicronctl tasks", f"unicron-replay story task {event.task} --nats URL"
            title = f"task {event.task} has failed"
            notices.append(Notice(f"task:{event.task}", "task_failed", "critical", title, event.reason, commands))
        case v.NodeIsolated() if not _is_isolated(before, event.node) and _is_isolated(after, event.node):
            notices.append(
                Notice(
                    f"node:{event.node}",
                    "isolated",
                    "error",
                    f"node {event.node} is isolated",
                    event.reason,
                    (f"unicron-replay story node {event.node} --nats URL", f"unicronctl uncordon {event.node}"),
                    alarm=f"node-isolated:{event.node}",
                )
            )
        case v.DecisionHeld() if event.key in after.holds:
            remedies = (brakes.remedy(after.holds[event.key]), "unicronctl status")
            notices.append(Notice(f"hold:{event.key}", "held", "critical", event.sentence(), event.reason, remedies))
        case v.HoldLifted() if event.key in before.holds:
            notices.append(Notice(f"hold:{event.key}", "held", "info", event.sentence(), is_over=True))
        case v.NodeReadmitted() if _is_isolated(before, event.node) and not _is_isolated(after, event.node):
            title = f"node {event.node} works again"
            notices.append(Notice(f"node:{event.node}", "isolated", "info", title, event.reason, is_over=True))
        case v.NodeChecked(has_passed=False) | v.RepairEnded(has_passed=False) if _is_isolated(after, event.node):
            procedure = "health check" if isinstance(event, v.NodeChecked) else "repair"
            title = f"node {event.node} stays isolated: its {procedure} failed"
            alarm = f"node-isolated:{event.node}"
            notices.append(
                Notice(
                    f"node:{event.node}", "refused", "error", title, event.detail, ("unicronctl nodes",), alarm=alarm
                )
            )
    return notices


def taken_over(state: ClusterState) -> list[Notice]:
    """Return the notice of a coordinator that has just become live; the first of a log has taken over from none."""
    if state.term < 2:
        return []
    title = f"a coordinator has taken over: term {state.term}"
    text = f"{len(state.incidents)} incidents open, {len(state.active)} tasks active"
    return [Notice(f"term:{state.term}", "takeover", "warning", title, text, ("unicronctl status",))]


def standing(
    state: ClusterState, now_us: int, no_progress_us: int, trouble: Iterable[str], alarms: Mapping[str, str] = {}
) -> list[Notice]:
    """Return the notices of what holds now. `trouble`: lines that an operator must look at. `alarms`: texts by key."""
    notices = _spares(state)
    for task in state.active if no_progress_us else ():
        assignment = state.plan.assignments.get(task.name)
        since_us = max(task.progress.last_commit_us, task.submitted_us)
        if assignment and assignment.workers and now_us - since_us > no_progress_us:
            title = f"task {task.name} has made no step for {(now_us - since_us) // 60_000_000} min"
            text = f"iteration {task.progress.iteration}; {len(state.incidents)} incidents open"
            commands = f"unicronctl logs {task.name}", f"unicron-replay story task {task.name} --nats URL"
            notices.append(Notice(f"progress:{task.name}", "no_progress", "critical", title, text, commands))
    for line in trouble:
        # The matter is what the line is about; counts and times in it change.
        key = "".join(letter for letter in line if not letter.isdigit())[:80]
        notices.append(Notice(f"trouble:{key}", "trouble", "critical", line, "", ("unicronctl status",)))
    return notices + [alarm_notice(key, line) for key, line in alarms.items()]


def alarm_notice(key: str, line: str) -> Notice:
    """Return the notice of an alarm."""
    commands = "unicronctl alarms", f"unicronctl acknowledge {key}"
    return Notice(f"alarm:{key}", "trouble", "critical", line, "", commands, alarm=key)


def story(incident: Incident) -> str:
    """Describe an incident in a few lines."""
    lines = [f"{incident.kind}, {incident.severity.name}: {incident.location}", incident.message]
    if incident.place:
        lines.append(f"where: {incident.place}")
    lines.append(f"tasks: {', '.join(incident.tasks) or 'none'}; response: {RESPONSE[incident.severity]}")
    if incident.closed_us:
        lines.append(
            f"healed: detected in {incident.detection_us / 1e6:.2f} s, transition {incident.transition_us / 1e6:.2f}"
            f" s, {incident.micro_batches_repeated} micro-batches repeated"
        )
    return "\n".join(lines)


def _link_notices(before: ClusterState, after: ClusterState) -> list[Notice]:
    if before.links is after.links:
        return []
    notices = []
    for key, link in after.links.items():
        old = before.links.get(key)
        if link.is_poor and not (old is not None and old.is_poor):
            title, commands = links.pair_text(after, link.ends), ("unicronctl doctor", "unicronctl plan show")
            notices.append(Notice(f"link:{key}", "link", "error", title, _tasks_on(after, link.ends), commands))
        elif old is not None and old.is_poor and not link.is_poor:
            title = f"the link between {link.first} and {link.second} is good again"
            notices.append(Notice(f"link:{key}", "link", "info", title, is_over=True))
    return notices


def _tasks_on(state: ClusterState, nodes: tuple[str, ...]) -> str:
    """Return the tasks that have workers on all these nodes, in words."""
    on_all = [task.name for task in state.active if all(state.by_node.of_task(node, task.name) for node in nodes)]
    return f"tasks on both: {', '.join(on_all) or 'none'}"


def _incident_notices(before: ClusterState, after: ClusterState) -> list[Notice]:
    if before.incidents is after.incidents:
        return []
    notices = []
    for name, incident in after.incidents.items():
        old = before.incidents.get(name)
        if incident.severity is Severity.SEV1 and (old is None or old.severity is not Severity.SEV1):
            title = f"SEV1: {incident.kind} on {incident.node or incident.location}"
            commands = f"unicron-replay story incident {name} --nats URL", "unicronctl status"
            notices.append(Notice(name, "sev1", "error", title, story(incident), commands))
    closed = (
        after.closed_incidents[-1]
        if after.closed_incidents is not before.closed_incidents and after.closed_incidents
        else None
    )
    if closed is not None and closed.severity is Severity.SEV1:
        title = f"SEV1 healed: {closed.kind} on {closed.node or closed.location}"
        notices.append(Notice(closed.id, "sev1", "info", title, story(closed), is_over=True))
    return notices


def _crash_notices(before: ClusterState, after: ClusterState) -> Iterator[Notice]:
    """Yield a notice for each task that has begun to fail again and again, or has stopped doing so."""
    if before.tasks is after.tasks:
        return
    for name, (old, task) in changed(before.tasks, after.tasks).items():
        was, is_now = old is not None and is_looping(old), task is not None and is_looping(task)
        if is_now and not was and task is not None and task.troubles.crashes is not None:
            text = f"{looping_text(task)}\n{task.troubles.crashes.tail}".rstrip()
            commands = f"unicronctl describe task {name}", f"unicronctl logs {name}"
            title, alarm = f"task {name} is crash-looping", f"task-waiting:{name}"
            yield Notice(f"crash:{name}", "crash_looping", "error", title, text, commands, alarm=alarm)
        elif was and not is_now:
            title = f"task {name} is crash-looping no more"
            yield Notice(f"crash:{name}", "crash_looping", "info", title, is_over=True)
        yield from _local_fault_notices(name, old, task)
        yield from _divergence_notices(name, old, task)


def _divergence_notices(name: str, old: Task | None, task: Task | None) -> Iterator[Notice]:
    """Yield a notice when a task's program is first seen to diverge, and when its replicas' environments are."""
    divergence = task.troubles.divergence if task is not None else None
    if task is None or divergence is None or (old is not None and old.troubles.divergence == divergence):
        return
    urgency: Urgency = "critical"
    title = f"task {name} trains something else on each replica, or each time"
    if not divergence.is_programs:
        title, urgency = f"replicas of task {name} compute on different things", "warning"
    commands = f"unicronctl describe task {name}", f"unicronctl logs {name}"
    yield Notice(f"diverged:{name}", "diverged", urgency, title, diverging_text(task), commands)


def _local_fault_notices(name: str, old: Task | None, task: Task | None) -> Iterator[Notice]:
    """Yield a notice for each node on which alone the task's program has failed, and for each that is forgiven."""
    was, now = (version.troubles.local_faults if version is not None else {} for version in (old, task))
    for node in sorted(now.keys() - was.keys()):
        title = f"task {name} has failed on {node} alone"
        commands = f"unicronctl describe node {node}", f"unicronctl logs {name}"
        yield Notice(f"local:{name}:{node}", "local_fault", "warning", title, now[node].text, commands)
    for node in sorted(was.keys() - now.keys()):
        title = f"nothing of task {name} is held against {node} any more"
        yield Notice(f"local:{name}:{node}", "local_fault", "info", title, is_over=True)


def _spares(state: ClusterState) -> list[Notice]:
    free = sum(node.slots for node in state.nodes.values() if node.schedulable and not node.cordon.active)
    if free > sum(state.plan.workers.values()) or state.plan.waf >= state.plan.waf_if_healthy:
        return []
    out = [node.name for node in state.nodes.values() if node.status is NodeStatus.LOST or node.isolation.active]
    text = f"{state.plan.reason}\nout: {', '.join(out[:20]) or 'none'}"
    return [Notice("spares", "no_spare", "error", "no spare slot is left", text, ("unicronctl plan show",))]


def _has_failed(before: ClusterState, after: ClusterState, name: str) -> bool:
    task, old = after.tasks.get(name), before.tasks.get(name)
    return task is not None and task.status is TaskStatus.FAILED and (old is None or old.status is not task.status)


def _is_isolated(state: ClusterState, name: str) -> bool:
    return name in state.nodes and state.nodes[name].isolation.active
