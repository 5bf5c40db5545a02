"""What `unicron-replay` prints: entries as lines, a state as a page. Pure, and free of control characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from events.envelope import Entry, Quarantined
from events.prose import summary
from replay.point import format_time
from unicrond.state import ClusterState, Incident, Node, Task, digest, to_json

CLOSED_SHOWN = 10


def entry_line(entry: Entry) -> str:
    """Time, sequence number and the event's sentence."""
    if isinstance(entry, Quarantined):
        said = f"quarantined, {entry.size_bytes} bytes on {entry.subject or 'an unknown subject'}: {entry.reason}"
    else:
        said = summary(entry.envelope.event)
    return f"{format_time(entry.recorded_at_us)} {entry.seq:>7} {_plain(said)}"


def entry_json(entry: Entry) -> dict[str, Any]:
    """The entry as plain JSON types, its prose with it."""
    if isinstance(entry, Quarantined):
        return {"seq": entry.seq, "recorded_at_us": entry.recorded_at_us, "quarantined": entry.reason}
    return {
        "seq": entry.seq,
        "recorded_at_us": entry.recorded_at_us,
        "summary": summary(entry.envelope.event),
        "envelope": msgspec.to_builtins(entry.envelope),
    }


def digest_json(state: ClusterState) -> dict[str, Any]:
    """The digest and the point that it belongs to."""
    return {"digest": digest(state), "seq": state.seq, "now_us": state.now_us, "term": state.term}


def state_json(state: ClusterState) -> dict[str, Any]:
    """The whole state, and its digest."""
    return {"digest": digest(state), "state": to_json(state)}


def state_page(state: ClusterState) -> str:
    """The state for people: when, nodes, tasks, plan, incidents."""
    when = f"{format_time(state.now_us)}, term {state.term}" if state.seq else "the log's beginning"
    lines = [f"entry {state.seq}, {when}", f"digest {digest(state)}"]
    oddities = {"quarantined": state.quarantined, "duplicates": state.duplicates, "of an old term": state.inert}
    if any(oddities.values()):
        lines.append("not folded: " + ", ".join(f"{count} {what}" for what, count in oddities.items() if count))
    nodes = [_node_row(state, node) for node in state.nodes.values()]
    lines += _section("nodes", ("name", "status", "slots", "workers"), nodes)
    lines += _section(
        "tasks",
        ("name", "status", "weight", "workers", "generation", "iteration", "loss", "reason"),
        [_task_row(task) for task in state.tasks.values()],
    )
    plan = state.plan
    lines += ["", f"plan {plan.epoch} ({plan.trigger}): {plan.reason}" if plan.epoch else "no plan yet"]
    lines += [f"  {a.task}: {a.workers} workers, WAF {a.waf:.4g} FLOP/s" for a in plan.assignments.values()]
    columns = ("id", "kind", "severity", "node", "worker", "detected", "transition", "what")
    lines += _section("open incidents", columns, [_incident_row(incident) for incident in state.incidents.values()])
    closed = [_incident_row(incident) for incident in state.closed[-CLOSED_SHOWN:]]
    lines += _section(f"closed incidents (last {len(closed)})", columns, closed)
    return "\n".join(_plain(line) for line in lines)


def _node_row(state: ClusterState, node: Node) -> tuple[str, ...]:
    workers = [w.worker for task in state.tasks.values() for w in task.workers.values() if w.node == node.name]
    status = f"{node.status}, isolated" if node.isolated else str(node.status)
    return node.name, status, str(node.slots), " ".join(workers)


def _task_row(task: Task) -> tuple[str, ...]:
    members = len(task.membership.members) if task.membership else 0
    loss = "" if task.loss is None else f"{task.loss:.4f}"
    iteration = f"{task.iteration}/{task.spec.iterations}"
    weight = f"{task.spec.weight:g}"
    return task.name, str(task.status), weight, str(members), str(task.generation), iteration, loss, task.reason


def _incident_row(incident: Incident) -> tuple[str, ...]:
    costs = ("", "")
    if incident.closed_us:
        costs = f"{incident.detection_us / 1e6:.3f} s", f"{incident.transition_us / 1e6:.3f} s"
    severity = f"SEV{int(incident.severity)}"
    what = incident.response or incident.message
    return incident.id, incident.kind, severity, incident.node, incident.worker, *costs, what


def _section(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A title and a table in aligned columns; nothing at all without rows."""
    if not rows:
        return []
    table = [[_plain(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    body = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return ["", title, *(f"  {line}".rstrip() for line in body)]


def _plain(text: str) -> str:
    """The text on one line, without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else "�" for char in text.replace("\n", " "))
