"""Stories: what became of a node, a task, an incident or a plan, in the log's own sentences. Pure.

Rules
-----
* An `Index` is built in one pass: which subjects there are, and where an incident begins and ends. An incident
  begins with the first symptom that it explained, and ends with its TransitionCompleted.
* A `Story` is built in a second pass: it takes the entries that belong to its subject. Causes are shown by what
  the log holds: a decision by the entries that the coordinator had read (`based_on`), a membership by its
  incident, a command by the plan's epoch and by the batch in which it was committed.
* Routine takes one sentence: steps of a task by their range, acknowledgements not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from unicrond.core.replayer import LogStep
from unicrond.core.state.state import ClusterState, Incident
from unicrond.display.tables import clean
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import EPOCH, format_time
from unicrond.events.vocabulary.placements import expand
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.views.view import View

KINDS = ("node", "task", "incident", "plan")


class Subject(NamedTuple):
    """What a story is about. `kind` is one of KINDS; `name`: a node, a task, an incident's id, or a plan's epoch."""

    kind: str
    name: str


class NoSuchSubject(LookupError):
    """Nothing of that kind and name is in the log. One line, with the fix."""


@dataclass
class IncidentLife:
    """An incident from its first symptom on. `incident`: as it was last. `last_seq` 0: it is still open.

    `names`: its own id, and those of the incidents that it explained.
    """

    first_seq: int
    first_us: int
    incident: Incident
    names: tuple[str, ...]
    last_seq: int = 0


@dataclass
class Index(View):
    """The subjects that a log has."""

    state: ClusterState = field(default_factory=ClusterState)
    incidents: dict[str, IncidentLife] = field(default_factory=dict)
    #: Epoch -> the sequence number of its PlanAdopted.
    plans: dict[int, int] = field(default_factory=dict)

    def feed(self, step: LogStep) -> None:
        """Add the next step."""
        before, entry, self.state = step
        if self.state.plan.epoch != before.plan.epoch:
            self.plans[self.state.plan.epoch] = entry.seq
        if self.state.incidents is not before.incidents:
            self._follow_incidents(step)

    def _follow_incidents(self, step: LogStep) -> None:
        before, entry, _ = step
        now = self.state.incidents
        ended = [name for name in before.incidents if name not in now]
        explained: list[IncidentLife] = []
        for name in ended:
            life = self.incidents[name]
            if (
                self.state.closed_incidents is not before.closed_incidents
                and self.state.closed_incidents[-1].id == name
            ):
                life.incident, life.last_seq = self.state.closed_incidents[-1], entry.seq
            else:
                explained.append(self.incidents.pop(name))  # explained by the incident that is opened here
        for name, incident in now.items():
            if name not in self.incidents:
                first_seq, first_us = min(
                    ((life.first_seq, life.first_us) for life in explained), default=(entry.seq, entry.recorded_at_us)
                )
                names = (name, *(alias for life in explained for alias in life.names))
                self.incidents[name] = IncidentLife(first_seq, first_us, incident, names)
            else:
                self.incidents[name].incident = incident

    def subject(self, kind: str, name: str) -> Subject:
        """Return the subject that a person named. Raises NoSuchSubject, with the kind that has the name."""
        names_by_kind: dict[str, Collection[str]] = {
            "node": self.state.nodes,
            "task": self.state.tasks,
            "incident": self.incidents,
            "plan": [str(epoch) for epoch in self.plans],
        }
        if name in names_by_kind[kind]:
            return Subject(kind, name)
        guesses = [f"{guess} {name}" for guess in KINDS if name in names_by_kind[guess]]
        hint = f"did you mean {' or '.join(guesses)}?" if guesses else f"the log has {_abridged(names_by_kind[kind])}"
        raise NoSuchSubject(f"no {kind} {name}; {hint}")


@dataclass
class _Steps:
    """Committed iterations of one task that nothing interrupted."""

    task: str
    first: int
    last: int
    loss: float


class Story(View):
    """The account of one subject; it takes every step in order."""

    def __init__(self, subject: Subject, index: Index) -> None:
        self._subject = subject
        self._index = index
        self._lines: list[str] = []
        self._steps: dict[str, _Steps] = {}
        self._basis = (0, 0)
        life = index.incidents.get(subject.name) if subject.kind == "incident" else None
        self._life = life

    def feed(self, step: LogStep) -> None:
        """Add the next step."""
        before, entry, after = step
        if not isinstance(entry, RecordedEvent):
            return
        event = entry.envelope.event
        if not self._belongs(entry, before, after):
            return
        if isinstance(event, v.StepCommitted):
            self._add_steps(event)
            return
        if isinstance(event, v.CommandApplied):
            return
        self._flush_steps(event.tasks_named())
        self._append_line(entry, self._remark(entry, before, after))

    def page(self) -> str:
        """Return title, what happened in order, and how it ended."""
        self._flush_steps(list(self._steps))
        return "\n".join([*self._opening(), "", *(self._lines or ["  (nothing happened)"]), "", *self._ending()])

    # --- which entries -----------------------------------------------------------------------

    def _belongs(self, entry: RecordedEvent, before: ClusterState, after: ClusterState) -> bool:
        event = entry.envelope.event
        kind, name = self._subject
        if kind == "node":
            if isinstance(event, v.PlanAdopted):
                return self._plan_changes_node(event, before)
            if isinstance(event, v.TransitionCompleted):
                life = self._index.incidents.get(event.incident)
                return life is not None and life.incident.node == name
            return getattr(event, "node", None) == name and not isinstance(event, v.StepCommitted)
        if kind == "task":
            if isinstance(event, v.PlanAdopted):
                old = before.plan.assignments.get(name)
                new = next((expand(a) for a in event.assignments if a.task == name), None)
                return (old.replicas if old else None) != (new.replicas if new else None)
            if isinstance(event, v.TransitionCompleted):
                life = self._index.incidents.get(event.incident)
                return life is not None and name in life.incident.generations
            return name in event.tasks_named()
        if kind == "plan":
            return self._belongs_to_plan(entry, int(name), after.plan.epoch)
        return self._belongs_to_incident(entry)

    def _plan_changes_node(self, event: v.PlanAdopted, before: ClusterState) -> bool:
        name = self._subject.name
        old = _tasks_on(name, before.plan.assignments.values())
        return old != _tasks_on(name, event.assignments)

    def _belongs_to_plan(self, entry: RecordedEvent, epoch: int, epoch_in_force: int) -> bool:
        event = entry.envelope.event
        if isinstance(event, v.PlanAdopted):
            return event.epoch in (epoch, epoch + 1) and entry.seq == self._index.plans.get(event.epoch)
        if epoch_in_force != epoch:
            return False
        if isinstance(event, v.Command):
            return event.epoch == epoch
        return isinstance(
            event,
            v.MembershipDecided | v.WorkerReady | v.WorkerPaused | v.WorkerJoinedGroup | v.TransitionCompleted
            | v.WorkerExited | v.CommandFailed,
        )  # fmt: skip

    def _belongs_to_incident(self, entry: RecordedEvent) -> bool:
        life = self._life
        if life is None or entry.seq < life.first_seq or (life.last_seq and entry.seq > life.last_seq):
            return False
        event, incident = entry.envelope.event, life.incident
        if isinstance(event, v.TransitionCompleted):
            return event.incident == incident.id
        if isinstance(event, v.DeadlineExpired):
            subject = event.deadline_id.partition(":")[2]
            return any(word in subject for word in (*life.names, *incident.tasks, incident.node) if word)
        if isinstance(event, v.PlanAdopted | v.CoordinatorStarted):
            return True
        if incident.node and getattr(event, "node", None) == incident.node and not isinstance(event, v.StepCommitted):
            return True
        return any(task in incident.generations for task in event.tasks_named())

    # --- how they are shown ------------------------------------------------------------------

    def _remark(self, entry: RecordedEvent, before: ClusterState, after: ClusterState) -> str:
        """Say what the entry meant, where its sentence does not."""
        event = entry.envelope.event
        opened = after.incidents.get(f"i{entry.seq}")
        if opened is not None and opened.id not in before.incidents:
            return f" -> opens incident {opened.id}, SEV{opened.severity.value}"
        if after.incidents is not before.incidents:
            for name, incident in after.incidents.items():
                old = before.incidents.get(name)
                if old is None or isinstance(event, v.Decision):
                    continue
                if incident.kind != old.kind:
                    return f" -> the cause of incident {name}, now SEV{incident.severity.value}"
                if incident.symptoms != old.symptoms:
                    return f" -> a symptom of incident {name}"
                if incident.resumed_us and not old.resumed_us:
                    return f" -> training continues, incident {name} is healed"
        if isinstance(event, v.MembershipDecided):
            nodes = [node for node in dict.fromkeys(event.nodes_named()) if node]
            because = f", because of incident {event.incident}" if event.incident else ""
            return f" (sent to {', '.join(nodes)}{because})" if nodes else because
        return ""

    def _append_line(self, entry: RecordedEvent, remark: str) -> None:
        event, envelope = entry.envelope.event, entry.envelope
        basis = (envelope.term, envelope.based_on)
        if isinstance(event, v.Decision | v.Command) and envelope.based_on and basis != self._basis:
            self._basis = basis
            self._lines.append(f"  The coordinator, having read everything up to entry {envelope.based_on}:")
        self._lines.append(f"  {_clock(entry.recorded_at_us)} {entry.seq:>7}  {_short(event.sentence())}{remark}")

    def _add_steps(self, event: v.StepCommitted) -> None:
        steps = self._steps.get(event.task)
        if steps is None or event.first > steps.last + 1 or event.first < steps.first:
            self._flush_steps([event.task])
            self._steps[event.task] = _Steps(event.task, event.first, event.last, event.loss)
        else:
            steps.last, steps.loss = event.last, event.loss

    def _flush_steps(self, tasks: Iterable[str]) -> None:
        for task in list(tasks):
            steps = self._steps.pop(task, None)
            if steps is not None:
                iterations = (
                    f"iteration {steps.first}" if steps.first == steps.last else f"{steps.first} to {steps.last}"
                )
                self._lines.append(f"{'':25}{task} commits {iterations}, loss {steps.loss:.4g}")

    # --- beginning and end -------------------------------------------------------------------

    def _opening(self) -> list[str]:
        kind, name = self._subject
        final = self._index.state
        match kind:
            case "incident":
                assert self._life is not None, "it is in the index"
                incident = self._life.incident
                location = (
                    f"worker {incident.worker} on {incident.node}" if incident.worker else f"node {incident.node}"
                )
                hit = ", ".join(f"{task} in generation {broken}" for task, broken in incident.generations.items())
                return [
                    f"Incident {name}: {incident.kind}, SEV{incident.severity.value}, {location}",
                    clean(f"{incident.message}. It hit {hit or 'no task'}."),
                ]
            case "plan":
                return [f"Plan {name}, adopted by entry {self._index.plans[int(name)]}"]
            case "task":
                task = final.tasks[name]
                spec = task.spec
                return [
                    f"Task {name}: weight {spec.weight:g}, {spec.min_workers} to {spec.max_workers} workers,"
                    f" {spec.iterations} iterations"
                ]
            case _:
                return [f"Node {name}: {final.nodes[name].slots} slots at {final.nodes[name].address}"]

    def _ending(self) -> list[str]:
        kind, name = self._subject
        final = self._index.state
        if kind == "incident":
            assert self._life is not None, "it is in the index"
            return self._end_of_incident(self._life)
        if kind == "plan":
            after = self._index.plans.get(int(name) + 1)
            return [f"It was in force until entry {after}." if after else "It is in force at the end of the log."]
        if kind == "task":
            task = final.tasks[name]
            lives = [life for life in self._index.incidents.values() if name in life.incident.generations]
            reason = f" ({clean(task.ending.reason)})" if task.ending.reason else ""
            return [
                f"At the end it is {task.status.value}{reason} at iteration {task.progress.iteration}, generation"
                f" {task.generation}, {_after(lives)}."
            ]
        node = final.nodes[name]
        lives = [life for life in self._index.incidents.values() if life.incident.node == name]
        status = "isolated" if node.isolation.active else node.status.value
        return [f"At the end it is {status}, {_after(lives)}."]

    def _end_of_incident(self, life: IncidentLife) -> list[str]:
        incident = life.incident
        if not life.last_seq:
            return [f"It is still open at entry {self._index.state.seq}."]
        whole_s = (incident.closed_us - life.first_us) / 1e6
        return [
            f"From the first sign (entry {life.first_seq}, {format_time(life.first_us)}) to its end (entry"
            f" {life.last_seq}) it took {whole_s:.3f} s.",
            f"Response: {incident.response}. Detected {incident.detection_us / 1e6:.3f} s after it happened, cured"
            f" {incident.transition_us / 1e6:.3f} s later; {incident.micro_batches_repeated} micro-batches were"
            f" computed again,{_lost_work(incident)} {incident.symptoms} symptoms explained.",
        ]


def _lost_work(incident: Incident) -> str:
    count, iterations = incident.micro_batches_lost, incident.iterations_lost
    discarded = f" {count} finished ones were thrown away with the last replica," if count else ""
    again = f" {iterations} iterations were trained again (state from {incident.state_from})," if iterations else ""
    return discarded + again


def _after(lives: list[IncidentLife]) -> str:
    """Count the incidents and name them."""
    ids = ", ".join(life.incident.id for life in lives)
    return f"after incident {ids}" if len(lives) == 1 else f"after {len(lives)} incidents{': ' * bool(lives)}{ids}"


def _short(text: str, limit: int = 200) -> str:
    line = clean(text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _tasks_on(node: str, assignments: Iterable[v.TaskAssignment]) -> list[str]:
    each_of = [expand(assignment) for assignment in assignments]
    return sorted(a.task for a in each_of for nodes in a.replicas for member in nodes if member == node)


def _abridged(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(listed[-limit:]) + more) or "none"


def _clock(time_us: int) -> str:
    return (EPOCH + timedelta(microseconds=time_us)).strftime("%H:%M:%S.%f")[:-3] if 0 <= time_us < 2**57 else "?"
