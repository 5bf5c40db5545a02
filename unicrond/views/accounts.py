"""Accounts: what became of a node, a task, an incident, a plan or the cluster, in the log's own sentences.

One account is made, here, and shown everywhere: by `unicronctl story`, `GET /v1/story/...`, the page's cards and
`unicron-replay story`. A head makes those of all subjects as it folds; a replay that of one, from the whole log.

Rules
-----
* An incident begins with the first symptom that it explained, and ends with its TransitionCompleted. The account of
  one that is explained by another goes into the other's.
* Causes are shown by what the log holds: a decision by the entries that the coordinator had read (`based_on`), a
  membership by its incident, a command by the plan's epoch.
* A head's accounts are bounded, in lines and in number, and begin where its reading began, which is a snapshot as a
  rule. An account that lacks something says so (`is_whole`); the log has it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from unicrond.core.folding.stacks import incident_of, slowest_sections
from unicrond.core.nodes.outages import outcome
from unicrond.core.replayer import LogStep
from unicrond.core.state.state import ClusterState, Incident
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import abridge, clean, format_time
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.views.account_lines import (
    AccountText,
    belongs_to_incident,
    belongs_to_plan,
    lines_of,
    nodes_of_plan_change,
    remark_of,
    tasks_of_plan_change,
)
from unicrond.views.cluster_account import ClusterAccount
from unicrond.views.group_standings import NO_STANDINGS, GroupStandings
from unicrond.views.view import View

KINDS = ("node", "task", "incident", "plan")
#: How much of the past the cluster's account covers, unless it is asked for another span: a shift.
DEFAULT_LAST_S = 8 * 3600
#: Of a worker's output, at the end of an incident's account.
OUTPUT_LINES = 20
#: Of a head: the lines of an account, and the accounts of a kind. The newest are kept.
LINES_MAX = 200
ACCOUNTS_MAX = {"node": 5000, "task": 2000, "incident": 500, "plan": 100}


class Subject(NamedTuple):
    """What an account is about. `kind` is one of KINDS; `name`: a node, a task, an incident's id, a plan's epoch."""

    kind: str
    name: str


class NoSuchSubject(LookupError):
    """Nothing of that kind and name is in the log. One line, with the fix."""


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """An account as it is shown. `seq`: the last entry in it. `first_line`: what matters most, for lists."""

    kind: str
    name: str
    seq: int
    is_whole: bool
    first_line: str
    lines: tuple[str, ...]


@dataclass
class IncidentLife:
    """An incident from its first symptom on. `incident`: as it was last. `last_seq` 0: it is still open.

    `names`: its own id, and those of the incidents that it explained. `standings`: of its workers, where it was a hang.
    """

    first_seq: int
    first_us: int
    incident: Incident
    names: tuple[str, ...]
    last_seq: int = 0
    standings: GroupStandings = NO_STANDINGS


class Accounts(View):
    """Keeps the accounts of all subjects, or of `only` one, up to the last step. `lines_max`: 0 keeps all."""

    def __init__(self, only: Subject | None = None, *, lines_max: int = LINES_MAX) -> None:
        self._only = only
        self._lines_max = 0 if only else lines_max
        self.begin()

    def begin(self) -> None:
        """Start again at the log's beginning, where nothing is known."""
        self.state = ClusterState()
        #: The entry before the first that was read.
        self.after_seq = 0
        self.incidents: dict[str, IncidentLife] = {}
        #: Epoch -> the sequence number of its PlanAdopted.
        self.plans: dict[int, int] = {}
        self.cluster = ClusterAccount()
        self._accounts: dict[Subject, AccountText] = {}
        self._has_begun = False

    def feed(self, step: LogStep) -> None:
        """Add the next step."""
        before, entry, after = step
        if not self._has_begun:
            self._has_begun, self.after_seq = True, before.seq
            self.cluster.after_seq = before.seq
            for name, incident in before.incidents.items():
                self.incidents[name] = IncidentLife(entry.seq, incident.detected_us, incident, (name,))
        self.state = after
        if after.plan.epoch != before.plan.epoch:
            self.plans[after.plan.epoch] = entry.seq
            self._bound(self.plans, "plan")
        closed = self._follow_incidents(step) if after.incidents is not before.incidents else ()
        if isinstance(entry, RecordedEvent):
            self._begin_standings(entry.envelope.event, before)
            self.cluster.add(entry, before, after)
            self._add(entry, before, (*after.incidents, *closed))
        self._drop_others(closed)

    # --- the subjects ------------------------------------------------------------------------

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
        matches = [f"{match} {name}" for match in KINDS if name in names_by_kind[match]]
        hint = f"did you mean {' or '.join(matches)}?" if matches else f"the log has {_abridged(names_by_kind[kind])}"
        raise NoSuchSubject(f"no {kind} {name}; {hint}")

    def _follow_incidents(self, step: LogStep) -> tuple[str, ...]:
        """Follow which incidents there are; return those that this step has closed."""
        before, entry, after = step
        ended = [name for name in before.incidents if name not in after.incidents]
        closed = {incident.id: incident for incident in after.closed_incidents[-len(ended) :]} if ended else {}
        explained: list[IncidentLife] = []
        for name in ended:
            if name in closed:
                self.incidents[name].incident, self.incidents[name].last_seq = closed[name], entry.seq
            else:
                explained.append(self.incidents.pop(name))  # by the incident that is opened here
        for name, incident in after.incidents.items():
            if name in self.incidents:
                self.incidents[name].incident = incident
                continue
            first_seq, first_us = min(
                ((life.first_seq, life.first_us) for life in explained), default=(entry.seq, entry.recorded_at_us)
            )
            names = (name, *(alias for life in explained for alias in life.names))
            self.incidents[name] = IncidentLife(first_seq, first_us, incident, names)
            account = self._accounts[Subject("incident", name)] = AccountText(True, self._lines_max)
            parts = [self._accounts.pop(Subject("incident", life.incident.id), None) for life in explained]
            account.absorb([part for part in parts if part is not None])
        self._bound(self.incidents, "incident")
        return tuple(name for name in ended if name in closed)

    def _bound(self, subjects: dict[str, IncidentLife] | dict[int, int], kind: str) -> None:
        """Drop the oldest subjects of a head, and their accounts."""
        while self._lines_max and len(subjects) > ACCOUNTS_MAX[kind]:
            name = next(iter(subjects))
            del subjects[name]  # type: ignore[arg-type]
            self._accounts.pop(Subject(kind, str(name)), None)

    def _drop_others(self, closed: Collection[str]) -> None:
        """Drop the accounts that were only kept since the wanted one might have explained them."""
        for name in closed if self._only else ():
            if Subject("incident", name) != self._only:
                self._accounts.pop(Subject("incident", name), None)

    # --- what belongs to them ----------------------------------------------------------------

    def _add(self, entry: RecordedEvent, before: ClusterState, incidents: Collection[str]) -> None:
        event = entry.envelope.event
        if isinstance(event, v.CommandApplied):
            return
        subjects = [
            subject
            for subject in self._subjects_of(entry, before, incidents)
            if self._only is None or subject == self._only or subject.kind == self._only.kind == "incident"
        ]
        if not subjects:
            return
        if isinstance(event, v.StepCommitted):
            for subject in subjects:
                self._account(subject, before).add_steps(entry.seq, event)
            return
        lines, tasks = lines_of(entry, remark_of(entry, before, self.state)), tuple(event.tasks_named())
        if len(set(tasks)) > 1 or isinstance(event, v.PlanAdopted):
            lines = [line._replace(is_shared=True) for line in lines]
        for subject in subjects:
            for line in lines if subject.kind == "incident" else lines[:1]:
                self._account(subject, before).add(line, tasks)

    def _subjects_of(self, entry: RecordedEvent, before: ClusterState, incidents: Collection[str]) -> list[Subject]:
        event, epoch = entry.envelope.event, self.state.plan.epoch
        lives = (
            self._lives_of_stacks(event)
            if isinstance(event, v.StacksTaken)
            else [self.incidents[name] for name in incidents]
        )
        subjects = [
            Subject("incident", life.incident.id)
            for life in lives
            if belongs_to_incident(event, life.incident, life.names)
        ]
        if isinstance(event, v.PlanAdopted):
            nodes, tasks = nodes_of_plan_change(before, event), tasks_of_plan_change(before, event)
            is_first = self.plans.get(event.epoch) == entry.seq
            epochs = (event.epoch - 1, event.epoch) if is_first else ()
            subjects += [Subject("plan", str(number)) for number in epochs if number in self.plans]
        else:
            life = self.incidents.get(event.incident) if isinstance(event, v.TransitionCompleted) else None
            nodes = {life.incident.node} if life else {getattr(event, "node", "")}
            tasks = set(life.incident.tasks) if life else set(event.tasks_named())
            if isinstance(event, v.StepCommitted):
                nodes = set()
            elif epoch in self.plans and belongs_to_plan(event, epoch):
                subjects.append(Subject("plan", str(epoch)))
        subjects += [
            Subject("node", node) for node in sorted(nodes) if node in self.state.nodes or node in before.nodes
        ]
        return subjects + [Subject("task", task) for task in sorted(tasks) if task in self.state.tasks]

    def _lives_of_stacks(self, event: v.StacksTaken) -> list[IncidentLife]:
        """Return the incident that the stacks belong to, as it is now; it may have been closed before."""
        incident = incident_of(self.state, event)
        life = self.incidents.get(incident.id) if incident is not None else None
        if incident is None or life is None:
            return []
        life.incident = incident
        life.standings.add(event)
        return [life]

    def _begin_standings(self, event: v.Event, before: ClusterState) -> None:
        """Note which workers' stacks are about to come: those of a group that hangs."""
        if isinstance(event, v.MembershipDecided) and event.takes_stacks and event.task in before.tasks:
            life = self.incidents.get(event.incident)
            if life is not None:
                life.standings = GroupStandings(before.tasks[event.task])

    def _account(self, subject: Subject, before: ClusterState) -> AccountText:
        account = self._accounts.get(subject)
        if account is None:
            kind, name = subject
            is_new = {"node": name not in before.nodes, "task": name not in before.tasks, "plan": True}.get(kind, False)
            account = self._accounts[subject] = AccountText(is_new or not self.after_seq, self._lines_max)
            subjects = (
                [candidate for candidate in self._accounts if candidate.kind == kind] if self._is_crowded() else []
            )
            for oldest in subjects[: max(0, len(subjects) - ACCOUNTS_MAX[kind])]:
                del self._accounts[oldest]
        return account

    def _is_crowded(self) -> bool:
        return bool(self._lines_max) and len(self._accounts) > sum(ACCOUNTS_MAX.values())

    # --- the page ----------------------------------------------------------------------------

    def story(self, kind: str, name: str, *, is_own: bool = False) -> Story:
        """Tell what became of the subject: title, what happened in order, how it ended. `is_own`: to who sees one
        owner's tasks alone. Raises NoSuchSubject."""
        subject = self.subject(kind, name)
        account = self._accounts.get(subject) or AccountText(not self.after_seq)
        title, ending = self._title(subject), self._ending(subject)
        is_whole = account.is_whole and not account.left_out
        before = f"  (what came before entry {self.after_seq + 1} stands in the log alone)"
        gap = [] if account.is_whole else ["", before]
        return Story(
            kind=kind,
            name=name,
            seq=self.state.seq,
            is_whole=is_whole,
            first_line=title[0],
            lines=(*title, *gap, "", *account.text(is_own=is_own), "", *ending),
        )

    def cluster_story(self, since_us: int, alarms: Sequence[str] | None = None) -> Story:
        """Tell what happened in the cluster since then. `alarms`: of the head that tells it; None: no head does."""
        incidents = {incident.id: incident for incident in self.state.closed_incidents}
        incidents |= {life.incident.id: life.incident for life in self.incidents.values()}
        lines = self.cluster.page(self.state, incidents.values(), since_us, alarms)
        is_whole = self.cluster.is_whole(since_us)
        return Story(
            kind="cluster", name="", seq=self.state.seq, is_whole=is_whole, first_line=lines[0], lines=tuple(lines)
        )

    def _title(self, subject: Subject) -> list[str]:
        kind, name = subject
        match kind:
            case "incident":
                return incident_title(self.incidents[name].incident)
            case "plan":
                return [f"Plan {name}, adopted by entry {self.plans[int(name)]}"]
            case "task":
                spec = self.state.tasks[name].spec
                return [
                    f"Task {name}: weight {spec.weight:g}, {spec.min_workers} to {spec.max_workers} workers,"
                    f" {spec.iterations} iterations"
                ]
            case _:
                node = self.state.nodes[name]
                domain = f" in domain {node.domain}" if node.domain else ""
                return [f"Node {name}: {node.slots} slots at {node.address}{domain}"]

    def _ending(self, subject: Subject) -> list[str]:
        kind, name = subject
        lives = self.incidents.values()
        if kind == "incident":
            return self._end_of_incident(self.incidents[name])
        if kind == "plan":
            after = self.plans.get(int(name) + 1)
            return [f"It was in force until entry {after}." if after else "It is in force at the end of the log."]
        if kind == "task":
            task = self.state.tasks[name]
            hits = _after([life for life in lives if name in life.incident.generations])
            reason = f" ({clean(task.ending.reason)})" if task.ending.reason else ""
            return [
                f"At the end it is {task.status.value}{reason} at iteration {task.progress.iteration}, generation"
                f" {task.generation}, {hits}."
            ]
        node = self.state.nodes[name]
        status = "isolated" if node.isolation.active else node.status.value
        return [f"At the end it is {status}, {_after([life for life in lives if life.incident.node == name])}."]

    def _end_of_incident(self, life: IncidentLife) -> list[str]:
        incident = life.incident
        output = [f"  {clean(line)}" for line in incident.log_tail.splitlines()[-OUTPUT_LINES:]]
        tail = [*stood_lines(incident), *(f"  {line}" for line in life.standings.lines())]
        tail += ["", f"The last output of worker {incident.worker}:", *output] if output else []
        if not life.last_seq:
            return [f"It is still open at entry {self.state.seq}.", *tail]
        whole_s = (incident.closed_us - life.first_us) / 1e6
        return [
            f"From the first sign (entry {life.first_seq}, {format_time(life.first_us)}) to its end (entry"
            f" {life.last_seq}) it took {whole_s:.3f} s.",
            f"Response: {incident.response}. Detected {incident.detection_us / 1e6:.3f} s after it happened, cured"
            f" {incident.transition_us / 1e6:.3f} s later; {incident.micro_batches_repeated} micro-batches were"
            f" computed again,{_lost_work(incident)} {incident.symptoms} symptoms explained.",
            *([f"Of those that were lost together, {outcome(incident)}."] if incident.nodes else []),
            *tail,
        ]


def incident_title(incident: Incident) -> list[str]:
    """Say in two lines what an incident is."""
    hit = ", ".join(f"{task} in generation {broken}" for task, broken in incident.generations.items())
    return [
        f"Incident {incident.id}: {incident.kind}, SEV{incident.severity.value}, {incident.location}",
        clean(f"{incident.message}. It hit {hit or 'no task'}."),
    ]


def stood_lines(incident: Incident) -> list[str]:
    """Say where the workers of the incident's group stood when it hung; nothing where no stack was taken."""
    lines = [f"  {abridge(workers)}: {clean(place)}" for place, workers in incident.stacks.items()]
    return ["", "Where the workers stood:", *lines, f"  {slowest_sections(incident)}"] if lines else []


def _lost_work(incident: Incident) -> str:
    count = incident.micro_batches_lost
    discarded = f" {count} finished ones were thrown away with the last replica," if count else ""
    iterations = incident.iterations_lost
    again = f" {iterations} iterations were trained again (state from {incident.state_from})," if iterations else ""
    return discarded + again


def _after(lives: list[IncidentLife]) -> str:
    """Count the incidents and name them."""
    ids = ", ".join(life.incident.id for life in lives)
    return f"after incident {ids}" if len(lives) == 1 else f"after {len(lives)} incidents{': ' * bool(lives)}{ids}"


def _abridged(names: Collection[str], limit: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(listed[-limit:]) + more) or "none"
