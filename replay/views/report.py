"""What `unicron-replay` prints: entries as lines, a state as a page. Pure, and free of control characters."""

from __future__ import annotations

from typing import Any

from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import digest, to_json
from unicrond.display.cluster_tables import incidents_table, nodes_table, plan_table, tasks_table
from unicrond.display.tables import plain
from unicrond.events.vocabulary.phrases import clean, format_time
from unicrond.events.wire.envelope import Entry, QuarantinedMessage

CLOSED_SHOWN = 10


def entry_line(entry: Entry) -> str:
    """Format time, sequence number and the event's sentence."""
    if isinstance(entry, QuarantinedMessage):
        sentence = f"quarantined, {entry.size_bytes} bytes on {entry.subject or 'an unknown subject'}: {entry.reason}"
    else:
        sentence = entry.envelope.event.sentence()
    return f"{format_time(entry.recorded_at_us)} {entry.seq:>7} {clean(sentence)}"


def digest_json(state: ClusterState) -> dict[str, Any]:
    """Return the digest and the point that it belongs to."""
    return {"digest": digest(state), "seq": state.seq, "now_us": state.now_us, "term": state.term}


def state_json(state: ClusterState) -> dict[str, Any]:
    """Return the whole state, and its digest."""
    return {"digest": digest(state), "state": to_json(state)}


def when(state: ClusterState) -> str:
    """Describe the point that a state belongs to."""
    moment = f"{format_time(state.now_us)}, term {state.term}" if state.seq else "before the first event"
    return f"entry {state.seq}, {moment}"


def state_page(state: ClusterState) -> str:
    """Format the state for people: when, nodes, tasks, plan, incidents; the tables are those of `unicronctl`."""
    lines = [when(state), f"digest {digest(state)}"]
    oddities = {
        "quarantined": state.quarantined_messages,
        "duplicates": state.duplicates,
        "of an old term": state.inert,
    }
    if any(oddities.values()):
        lines.append("not folded: " + ", ".join(f"{count} {label}" for label, count in oddities.items() if count))
    plan = state.plan
    sections = {
        "nodes": nodes_table(state),
        "tasks": tasks_table(state),
        f"plan {plan.epoch} ({plan.trigger}): {plan.reason}" if plan.epoch else "no plan yet": plan_table(state),
        f"incidents ({len(state.incidents)} open)": incidents_table(state, state.now_us, CLOSED_SHOWN),
    }
    for title, table in sections.items():
        lines += ["", clean(title), *(f"  {line}" for line in plain(table))]
    return "\n".join(lines)
