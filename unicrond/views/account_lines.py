"""The lines of an account: which subjects an entry belongs to, what it meant, how it stands on a page. Pure.

Rules
-----
* Each line is the event's own sentence; a remark says what it meant (an incident opened, healed) as the fold saw it.
* Routine takes one sentence: steps of a task by their range, acknowledgements not at all.
* An account may be bounded: it keeps its first lines and its last, and says how many are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from unicrond.core.state.state import ClusterState, Incident
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import EPOCH, clean, task_of
from unicrond.events.vocabulary.placements import expand
from unicrond.events.wire.envelope import RecordedEvent

#: Of one stack in an account, the most recent calls.
STACK_LINES = 24
#: So many of the first lines of a bounded account are kept.
FIRST_LINES = 40


class AccountLine(NamedTuple):
    """A line of an account. `basis`: for a decision, the last entry that the coordinator had read, and its term.
    `is_shared`: the entry may tell of other tasks than the account's, and is none for who sees one owner's alone."""

    seq: int
    text: str
    basis: tuple[int, int] = (0, 0)
    is_shared: bool = False


@dataclass
class _Steps:
    """Committed iterations of one task that nothing interrupted."""

    seq: int
    task: str
    first: int
    last: int
    loss: float

    def line(self) -> AccountLine:
        """Say it in one line."""
        iterations = f"iteration {self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        return AccountLine(self.seq, f"{'':25}{self.task} commits {iterations}, loss {self.loss:.4g}")


@dataclass
class AccountText:
    """What became of one subject. `is_whole`: nothing that came before its first line is missing. `lines_max`: 0 keeps
    all."""

    is_whole: bool
    lines_max: int = 0
    first: list[AccountLine] = field(default_factory=list)
    last: deque[AccountLine] = field(default_factory=deque)
    left_out: int = 0
    steps: dict[str, _Steps] = field(default_factory=dict)

    def add(self, line: AccountLine, tasks: Iterable[str] = ()) -> None:
        """Add a line, after the steps of the tasks that it names."""
        for task in tasks:
            if (steps := self.steps.pop(task, None)) is not None:
                self._keep(steps.line())
        self._keep(line)

    def add_steps(self, seq: int, event: v.StepCommitted) -> None:
        """Add committed iterations to those before them, or begin a line of them."""
        steps = self.steps.get(event.task)
        if steps is None or event.first > steps.last + 1 or event.first < steps.first:
            if steps is not None:
                self._keep(steps.line())
            self.steps[event.task] = _Steps(seq, event.task, event.first, event.last, event.loss)
        else:
            steps.last, steps.loss = event.last, event.loss

    def absorb(self, others: Iterable[AccountText]) -> None:
        """Take over the lines of accounts that this one explains, in the order of the log."""
        accounts = [self, *others]
        self.is_whole = all(account.is_whole for account in accounts)
        self.left_out = sum(account.left_out for account in accounts)
        lines = sorted({line for account in accounts for line in (*account.first, *account.last)})
        self.steps = {task: steps for account in reversed(accounts) for task, steps in account.steps.items()}
        self.first, self.last = [], deque()
        for line in lines:
            self._keep(line)

    def text(self, *, is_own: bool = False) -> list[str]:
        """Return the lines as they stand on a page. `is_own`: for who sees one owner's tasks alone."""
        page: list[str] = []
        basis = (0, 0)
        pending = [steps.line() for steps in self.steps.values()]
        for lines in (self.first, [*self.last, *pending]):
            for line in lines:
                if line.basis[1] and line.basis != basis:
                    basis = line.basis
                    page.append(f"  The coordinator, having read everything up to entry {basis[1]}:")
                is_hidden = is_own and line.is_shared
                page.append(f"{'':25}(entry {line.seq} tells of others' tasks, too)" if is_hidden else line.text)
            if lines is self.first and self.left_out:
                page.append(f"{'':25}({self.left_out} lines are left out here)")
        return page or ["  (nothing happened)"]

    def _keep(self, line: AccountLine) -> None:
        if not self.lines_max or len(self.first) < min(FIRST_LINES, self.lines_max):
            self.first.append(line)
            return
        self.last.append(line)
        if len(self.last) > self.lines_max - FIRST_LINES:
            self.last.popleft()
            self.left_out += 1


def line_of(entry: RecordedEvent, remark: str) -> AccountLine:
    """Return the line of an entry."""
    event, envelope = entry.envelope.event, entry.envelope
    basis = (envelope.term, envelope.based_on) if event.is_decided else (0, 0)
    return AccountLine(
        entry.seq, f"  {clock(entry.recorded_at_us)} {entry.seq:>7}  {_short(event.sentence())}{remark}", basis
    )


def lines_of(entry: RecordedEvent, remark: str) -> list[AccountLine]:
    """Return the lines of an entry: one, and of stacks those that show them."""
    event = entry.envelope.event
    if not isinstance(event, v.StacksTaken):
        return [line_of(entry, remark)]
    lines = [f"stacks of {event.task} on {event.node}:"]
    lines += [f"  {worker.sentence()}{f' ({worker.trouble})' if worker.trouble else ''}" for worker in event.workers]
    for number, text in enumerate(event.stacks, start=1):
        names = ", ".join(worker.worker for worker in event.workers if worker.stack == number)
        stack = text.splitlines()
        lines += [f"  stack of {names}:", *(f"    {line}" for line in stack[:STACK_LINES])]
        lines += [f"    and {len(stack) - STACK_LINES} more lines"] if len(stack) > STACK_LINES else []
    first = AccountLine(entry.seq, f"  {clock(entry.recorded_at_us)} {entry.seq:>7}  {_short(lines[0])}")
    return [first, *(AccountLine(entry.seq, f"{'':25}{_clipped(line)}") for line in lines[1:])]


def remark_of(entry: RecordedEvent, before: ClusterState, after: ClusterState) -> str:
    """Say what the entry meant, where its sentence does not."""
    event = entry.envelope.event
    if isinstance(event, v.MembershipDecided):
        nodes = [node for node in dict.fromkeys(event.nodes_named()) if node]
        because = f", because of incident {event.incident}" if event.incident else ""
        return f" (sent to {', '.join(nodes)}{because})" if nodes else because
    if after.incidents is before.incidents:
        return ""
    opened = after.incidents.get(f"i{entry.seq}")
    if opened is not None and opened.id not in before.incidents:
        return f" -> opens incident {opened.id}, SEV{opened.severity.value}"
    if isinstance(event, v.Decision):
        return ""
    for name, incident in after.incidents.items():
        old = before.incidents.get(name)
        if old is None:
            continue
        if incident.kind != old.kind:
            return f" -> the cause of incident {name}, now SEV{incident.severity.value}"
        if incident.symptoms != old.symptoms:
            return f" -> a symptom of incident {name}"
        if incident.resumed_us and not old.resumed_us:
            return f" -> training continues, incident {name} is healed"
    return ""


#: What an incident of many nodes is made of.
_OF_NODES = (v.NodeLost, v.NodesLost, v.NodeReturned, v.NodeJoined, v.NodeLeft)


def belongs_to_incident(event: v.AnyEvent, incident: Incident, names: Iterable[str]) -> bool:
    """Return whether the event, in the incident's life, is part of its account. `names`: its id, and those of the
    incidents that it explained."""
    if isinstance(event, v.TransitionCompleted):
        return event.incident == incident.id
    if isinstance(event, v.DeadlineExpired):
        subject = event.deadline_id.partition(":")[2].partition("#")[0]
        return subject in {*names, *incident.tasks, incident.node} or task_of(subject) in incident.tasks
    if isinstance(event, v.PlanAdopted | v.CoordinatorStarted):
        return True
    if isinstance(event, v.SilenceHeld | v.SilenceEnded) or (not incident.node and isinstance(event, _OF_NODES)):
        return incident.kind == "head_deaf" or any(name in incident.nodes for name in event.nodes_named())
    if incident.node and getattr(event, "node", None) == incident.node and not isinstance(event, v.StepCommitted):
        return True
    return any(task in incident.generations for task in event.tasks_named())


def belongs_to_plan(event: v.AnyEvent, epoch: int) -> bool:
    """Return whether the event, while the plan of this epoch is in force, is part of its account."""
    if isinstance(event, v.Command):
        return event.epoch == epoch
    return isinstance(
        event,
        v.MembershipDecided | v.WorkerReady | v.WorkerPaused | v.WorkerJoinedGroup | v.TransitionCompleted
        | v.WorkerExited | v.CommandFailed,
    )  # fmt: skip


def nodes_of_plan_change(before: ClusterState, event: v.PlanAdopted) -> set[str]:
    """Return the nodes whose workers the plan changes."""
    old, new = _workers_by_node(before.plan.assignments.values()), _workers_by_node(event.assignments)
    return {node for node in old.keys() | new.keys() if old.get(node) != new.get(node)}


def tasks_of_plan_change(before: ClusterState, event: v.PlanAdopted) -> set[str]:
    """Return the tasks whose workers the plan changes."""
    old = {name: assignment.replicas for name, assignment in before.plan.assignments.items()}
    new = {assignment.task: expand(assignment).replicas for assignment in event.assignments}
    return {task for task in old.keys() | new.keys() if old.get(task) != new.get(task)}


def clock(time_us: int) -> str:
    """Return the time of day in UTC, to the millisecond."""
    return (EPOCH + timedelta(microseconds=time_us)).strftime("%H:%M:%S.%f")[:-3] if 0 <= time_us < 2**57 else "?"


def _workers_by_node(assignments: Iterable[v.TaskAssignment]) -> dict[str, list[str]]:
    tasks: dict[str, list[str]] = {}
    for assignment in assignments:
        expanded = expand(assignment)
        for nodes in expanded.replicas:
            for node in nodes:
                tasks.setdefault(node, []).append(expanded.task)
    return {node: sorted(names) for node, names in tasks.items()}


def _short(text: str, limit: int = 200) -> str:
    return _clipped(clean(text), limit)


def _clipped(line: str, limit: int = 200) -> str:
    line = "".join(char if char.isprintable() else " " for char in line)
    return line if len(line) <= limit else line[: limit - 3] + "..."
