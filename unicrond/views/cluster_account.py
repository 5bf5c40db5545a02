"""What happened in the cluster in some last hours, on one page: for whoever comes on shift.

Rules
-----
* Incidents are grouped (incident_groups.py), real ones first; plans, tasks, nodes, heads and what people ordered
  stand in the log's own sentences, the newest of them if there are many.
* What comes back within the page is told once: a node that is only heard again, a task's steps, are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from unicrond.core.nodes.brakes import hold_text
from unicrond.core.state.state import ClusterState, Incident, NodeStatus, TaskStatus
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import clean, count, format_time
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.views.account_lines import clock
from unicrond.views.incident_groups import IncidentGroup, groups_sentence, incident_groups

Topic: TypeAlias = Literal["tasks", "nodes", "plans", "people and heads"]
TOPICS: tuple[Topic, ...] = ("tasks", "nodes", "plans", "people and heads")
#: Of a head: how much is remembered. Of a page: the lines of a topic.
HAPPENINGS_MAX, TOPIC_LINES_MAX, GROUPS_MAX = 20_000, 12, 12
_LINE_MAX = 160


class Happening(NamedTuple):
    """Something that happened in the cluster."""

    time_us: int
    seq: int
    topic: Topic
    text: str


class ClusterAccount:
    """Keeps what happened in the cluster. `after_seq`: the entry before the first that was read."""

    def __init__(self) -> None:
        self.after_seq = 0
        self.first_us = 0
        self._happenings: deque[Happening] = deque(maxlen=HAPPENINGS_MAX)

    def add(self, entry: RecordedEvent, before: ClusterState, after: ClusterState) -> None:
        """Add what the entry says of the cluster, if anything."""
        self.first_us = self.first_us or entry.recorded_at_us
        topic = _topic_of(entry.envelope.event, before, after)
        if topic is not None:
            text = clean(entry.envelope.event.sentence())
            self._happenings.append(Happening(entry.recorded_at_us, entry.seq, topic, text))

    def is_whole(self, since_us: int) -> bool:
        """Return whether nothing since then is missing."""
        dropped_us = self._happenings[0].time_us if len(self._happenings) == HAPPENINGS_MAX else 0
        return since_us >= dropped_us and (not self.after_seq or since_us >= self.first_us)

    def page(
        self, state: ClusterState, incidents: Iterable[Incident], since_us: int, alarms: Sequence[str] | None = None
    ) -> list[str]:
        """Return the page. `incidents`: those that are known; of the closed ones those since then count. `alarms`: of
        the head that tells it, now; None where no head does."""
        recent = [incident for incident in incidents if not incident.closed_us or incident.closed_us >= since_us]
        groups = incident_groups(recent)
        page = [f"The cluster from {_minute(since_us)} to {_minute(state.now_us)} (up to entry {state.seq})"]
        if not self.is_whole(since_us):
            page.append(f"  (what came before {_minute(self.first_us)}, entry {self.after_seq + 1}, stands in the log)")
        page += ["", *_now(state, alarms), "", f"Incidents: {groups_sentence(groups)}"]
        page += [_group_line(group) for group in groups[:GROUPS_MAX]]
        page += [f"  and {len(groups) - GROUPS_MAX} more kinds"] if len(groups) > GROUPS_MAX else []
        since = [happening for happening in self._happenings if happening.time_us >= since_us]
        for topic in TOPICS:
            happenings = [happening for happening in since if happening.topic == topic]
            page += [
                "",
                f"{topic.capitalize()}: {count(len(happenings), 'entry', 'entries') if happenings else 'nothing'}",
            ]
            if len(happenings) > TOPIC_LINES_MAX:
                page.append(f"  (the last {TOPIC_LINES_MAX} of them)")
            page += [
                f"  {clock(happening.time_us)} {happening.seq:>7}  {_short(happening.text)}"
                for happening in happenings[-TOPIC_LINES_MAX:]
            ]
        return page


def _now(state: ClusterState, alarms: Sequence[str] | None) -> list[str]:
    """Say how it stands now: alarms first, then what is open."""
    out = [
        f"{node.name} {'isolated' if node.isolation.active else node.status.value}"
        for node in state.nodes.values()
        if node.isolation.active or node.status is NodeStatus.LOST
    ]
    idle = [task.name for task in state.active if not state.plan.workers.get(task.name)]
    lines = [f"  ALARM: {alarm}" for alarm in alarms or ()]
    lines.append(f"  nodes: {len(state.nodes) - len(out)} of {len(state.nodes)} in service{_listed('; out: ', out)}")
    lines.append(f"  tasks: {len(state.active)} active{_listed('; without workers: ', idle)}")
    lines += [f"  held: {_short(hold_text(hold))}" for hold in state.holds.values()]
    lines += [
        f"  open: {incident.id} {incident.kind} on {incident.node or incident.location}: {_short(incident.message)}"
        for incident in state.incidents.values()
    ]
    return ["Now:" + ("" if alarms is None or alarms else " no alarm"), *lines]


def _listed(before: str, names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{before}{', '.join(names[:limit])}{more}" if names else ""


def _group_line(group: IncidentGroup) -> str:
    still = f", {group.unhealed} open" if group.unhealed else ""
    span = clock(group.first_us) if group.count == 1 else f"{clock(group.first_us)} to {clock(group.last_us)}"
    where = f"{_listed('; tasks ', group.tasks, 4)}{_listed('; nodes ', group.nodes, 4)}"
    example = group.ids[-1] if group.count == 1 else f"last {group.ids[-1]}"
    return f"  {group.count} x {_short(group.label)} ({group.cause}, {example}{still}), {span}{where}"


def _topic_of(event: v.AnyEvent, before: ClusterState, after: ClusterState) -> Topic | None:
    match event:
        case v.StepCommitted() | v.CommandApplied() | v.WorkerReady() | v.WorkerJoinedGroup():
            return None  # most of a log
        case v.PlanAdopted():
            return "plans"
        case v.TaskSubmitted() if event.spec.name in after.tasks and after.tasks is not before.tasks:
            return "tasks"
        case v.TaskCompleted() | v.TaskFailed() | v.TaskCancelled() if _has_ended(event.task, before, after):
            return "tasks"
        case v.NodeJoined() if event.node not in before.nodes or before.nodes[event.node].status is not NodeStatus.UP:
            return "nodes"
        case (
            v.NodeLost()
            | v.NodesLost()
            | v.NodeReturned()
            | v.NodeLeft()
            | v.NodeIsolated()
            | v.NodeReadmitted()
            | v.NodeForgotten()
        ):
            return "nodes"
        case v.DecisionHeld() | v.HoldLifted():
            return "nodes" if event.node else "tasks"
        case v.CoordinatorStarted() | v.SilenceHeld() | v.SilenceEnded():
            return "people and heads"
        case _:
            return "people and heads" if event.is_request else None


def _has_ended(name: str, before: ClusterState, after: ClusterState) -> bool:
    old, new = before.tasks.get(name), after.tasks.get(name)
    return old is not None and old.status is TaskStatus.ACTIVE and (new is None or new.status is not TaskStatus.ACTIVE)


def _minute(time_us: int) -> str:
    return f"{format_time(time_us)[:16]}Z"


def _short(text: str) -> str:
    line = clean(text)
    return line if len(line) <= _LINE_MAX else f"{line[: _LINE_MAX - 3]}..."
