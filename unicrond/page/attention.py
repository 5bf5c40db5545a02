"""What needs somebody, as the page's first view lists it: each with what to do next. Pure.

Rules
-----
* Only what does not pass by itself, and what is under way: open incidents, decisions that are held (nodes/brakes.py),
  nodes that are out without a person's order (of an outage that is held its incident and the head's alarm tell),
  tasks without workers, whose program fails again and again or diverges, tasks that have failed and did a step or were
  submitted within the last hour. Incidents come first, the worst of them before the others.
* An incident stands with the first line of its account (views/accounts.py).
* The alarms of a head are no part of a state: the page shows them before these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from unicrond.core.faults.program_faults import diverging_text, is_looping, looping_text
from unicrond.core.nodes import outages
from unicrond.core.nodes.brakes import hold_text, mode_text, open_holds, remedy
from unicrond.core.nodes.isolation import waits_for
from unicrond.core.state.alarms import Alarm, AlarmHandling
from unicrond.core.state.state import ClusterState, Node, NodeStatus, Task, TaskStatus
from unicrond.display.alarms import handling_words
from unicrond.display.queue import pending_reason
from unicrond.views.accounts import incident_title

#: For how long after its last step a failed task needs somebody.
FAILED_US = 3_600_000_000


def attention(state: ClusterState, hide: Callable[[str], str] = str, now_us: int = 0) -> list[dict[str, str]]:
    """Return rows of `what`, `remedy` (a command, or ""), `place` (of the page), `alarm` (its key, or "")
    and `handling` (what people did about it). `now_us`: wall clock of a head, whose log may be quiet for long; else the
    log's time counts."""
    now_us = max(now_us, state.now_us)
    awaited = outages.held_nodes(state)
    worst_first = sorted(state.incidents.values(), key=lambda incident: incident.severity.value)
    rows = [
        _row(
            ": ".join(incident_title(incident)), f"unicronctl story incident {incident.id}", f"incidents/{incident.id}"
        )
        for incident in worst_first
    ]
    if text := mode_text(state):
        rows.append(_row(f"mode {text}", "unicronctl mode heal", "plan"))
    rows += [_row(hold_text(hold), remedy(hold), "cluster") for hold in open_holds(state)]
    for task in state.tasks.values():
        if text := _trouble_of_task(state, task):
            has_failed = task.status is TaskStatus.FAILED
            command = f"unicronctl {'logs' if has_failed or is_looping(task) else 'describe task'} {task.name}"
            alarm = f"task-{'failed' if has_failed else 'waiting'}:{task.name}"
            rows.append(_row(f"task {task.name} {text}", command, "tasks", alarm))
    rows += [
        _row(f"node {node.name} {text}", f"unicronctl story node {node.name}", "cluster", f"{name}:{node.name}")
        for node in state.nodes.values()
        if node.name not in awaited
        for name, text in _trouble_of_node(state, node)
    ]
    rows += [
        _row(
            f"{tally.count} observations of node {name} were refused, the last: {tally.reason}"[:400],
            f"unicronctl describe node {name}",
            "cluster",
            f"observations-refused:{name}",
        )
        for name, tally in state.refused_observations.items()
        if state.now_us - tally.last_us < FAILED_US
    ]
    for row in rows:
        row["handling"] = handling_words(state.alarms.get(row["alarm"], AlarmHandling()), now_us)
    return [{name: hide(text) for name, text in row.items()} for row in rows]


def state_alarms(state: ClusterState) -> list[Alarm]:
    """Return the rows that are alarms: of nodes and tasks. An incident has its own name, and ends by itself."""
    keys = [(row["alarm"].partition(":"), row["what"]) for row in attention(state) if row["alarm"]]
    return [Alarm(name, text, subject) for (name, _, subject), text in keys]


def _trouble_of_task(state: ClusterState, task: Task) -> str:
    if task.status is TaskStatus.FAILED:
        recent = state.now_us - max(task.progress.last_commit_us, task.submitted_us) < FAILED_US
        return f"has failed: {task.ending.reason.partition(chr(10))[0]}" if recent else ""
    if task.status is not TaskStatus.ACTIVE:
        return ""
    looping = looping_text(task) if is_looping(task) else ""
    return "; ".join(filter(None, (pending_reason(state, task), diverging_text(task), looping)))


def _trouble_of_node(state: ClusterState, node: Node) -> Iterator[tuple[str, str]]:
    """Yield the alarm's name and its text, at most one."""
    if node.status is NodeStatus.LOST:
        yield "node-lost", "is lost: see that its machine and agent run"
    elif node.isolation.active:
        yield "node-isolated", "; ".join(filter(None, (f"is isolated: {node.reason}", waits_for(state, node))))
    elif node.health.repair_need:
        yield "node-repair", f"needs {node.health.repair_need}"


def _row(what: str, remedy: str, place: str, alarm: str = "") -> dict[str, str]:
    return {"what": what, "remedy": remedy, "place": place, "alarm": alarm}
