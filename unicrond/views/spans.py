"""An incident as a trace, from the fault to the next step; and each command as a span. Pure.

    incident                    from when the fault occurred until the tasks that it hit have made a step again
      detection                 until it was in the log
      decision                  until the new membership was decided
      regrouping                until the last task hit went on training
        WorkerJoinedGroup         each report of a worker, with its own duration
      StartWorker, StopWorker   commands meanwhile to nodes of these tasks: from the log until the agent has obeyed
      worker start              from the command to start it until a worker has built its model
      first step                of each task

Rules
-----
* Times are the log's, but the fault's own, which is its observer's.
* Numbers of traces and spans follow from the log alone: a coordinator and a replay give the same.
* A command outside of every incident is a trace of its own, and so is a start.
* An incident that takes others over has their spans. What came before the reading began is not there.

What does not live here: how spans leave the process (service/export/tracing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from unicrond.core.replayer import LogStep
from unicrond.core.state.state import ClusterState, Incident, TaskStatus
from unicrond.events import vocabulary as v
from unicrond.views.view import JsonView

DETECTION, DECISION, REGROUPING, FIRST_STEP = "detection", "decision", "regrouping", "first step"
PHASES = (DETECTION, DECISION, REGROUPING, FIRST_STEP)
#: Child spans of one incident, at most; a large group has as many reports as workers.
_CHILDREN_MAX = 500
#: Pending commands, at most.
_ORDERS_MAX = 10_000
About: TypeAlias = Mapping[str, str | int]


class Span(NamedTuple):
    """A span of a trace, as OpenTelemetry has it. `trace`: 128 bits, `span` and `parent`: 64 bits; no parent: 0.
    `error`: why, "" where it went well."""

    trace: int
    span: int
    parent: int
    name: str
    start_us: int
    end_us: int
    about: About
    error: str = ""


class PhaseDuration(NamedTuple):
    """How often a phase happened, and how long all of them took together."""

    times: int = 0
    total_us: int = 0


class _SpanDraft(NamedTuple):
    """A span without its numbers yet."""

    name: str
    start_us: int
    end_us: int
    about: About
    error: str = ""


class _PendingCommand(NamedTuple):
    """A command that has no outcome yet. `incident`: the one during which it was given, or ""."""

    name: str
    about: About
    given_us: int
    incident: str


@dataclass
class _Track:
    """The spans of one incident as they come. `stepped_us`: by task, its first step since."""

    decided_us: int = 0
    stepped_us: dict[str, int] = field(default_factory=dict)
    parts: list[_SpanDraft] = field(default_factory=list)
    closed: Incident | None = None


def _ignore_spans(_spans: Sequence[Span], _state: ClusterState) -> None:
    pass


class Spans(JsonView):
    """Makes spans of the log's steps. `on_end`: called with the spans that have ended and the state by then; must
    neither raise nor wait. `phases`: of transitions, since the reading began."""

    def __init__(self, on_end: Callable[[Sequence[Span], ClusterState], None] = _ignore_spans) -> None:
        self._on_end = on_end
        self.begin()

    def begin(self) -> None:
        """Start again at the log's beginning."""
        self.phases = dict.fromkeys(PHASES, PhaseDuration())
        self._tracks: dict[str, _Track] = {}
        #: By command id; starts by worker id as well.
        self._orders: dict[str, _PendingCommand] = {}

    def value(self, _: ClusterState) -> dict[str, dict[str, int]]:
        """Return how often each phase of a transition happened, and how long all of them took."""
        return {name: phase._asdict() for name, phase in self.phases.items()}

    def feed(self, step: LogStep) -> None:
        """Take the next step, and pass on the spans that have ended with it."""
        event = step.event
        spans = self._spans_of(step.before, step.after, event, step.entry.recorded_at_us) if event is not None else []
        for span in spans:
            if span.name in self.phases:
                times, total_us = self.phases[span.name]
                self.phases[span.name] = PhaseDuration(times + 1, total_us + span.end_us - span.start_us)
        if spans:
            self._on_end(spans, step.after)

    def _spans_of(self, before: ClusterState, after: ClusterState, event: v.AnyEvent, now_us: int) -> list[Span]:
        spans: list[Span] = []
        if before.incidents is not after.incidents:
            self._open_and_close(before, after)
        if isinstance(event, v.Command):
            self._open_command(after, event, now_us)
        elif isinstance(event, v.CommandApplied | v.CommandFailed):
            error = event.reason if isinstance(event, v.CommandFailed) else ""
            spans += self._close_command(event.command_id, now_us, error)
        elif isinstance(event, v.WorkerReady | v.WorkerExited):
            error = "the worker has ended" if isinstance(event, v.WorkerExited) else ""
            spans += self._close_command(event.worker, now_us, error)
        if self._tracks:
            self._happened(after, event, now_us)
            for name, track in list(self._tracks.items()):
                if track.closed is not None and _is_over(after, track.closed, track):
                    del self._tracks[name]
                    spans += _of_incident(track.closed, track)
        return spans

    def _open_and_close(self, before: ClusterState, after: ClusterState) -> None:
        successor = next((name for name in after.incidents if name not in before.incidents), "")
        for name in after.incidents:
            self._tracks.setdefault(name, _Track())
        for name in before.incidents:
            if name in after.incidents or name not in self._tracks:
                continue
            if after.closed_incidents is not before.closed_incidents and after.closed_incidents[-1].id == name:
                self._tracks[name].closed = after.closed_incidents[-1]
            else:
                old_track = self._tracks.pop(name)
                if successor:
                    self._tracks[successor].parts += old_track.parts

    def _happened(self, state: ClusterState, event: v.AnyEvent, now_us: int) -> None:
        """Note the times at which an incident's phases end."""
        if not isinstance(event, v.MembershipDecided | v.WorkerJoinedGroup | v.StepCommitted):
            return
        for name, track in self._tracks.items():
            broken = (track.closed or state.incidents[name]).generations.get(event.task)
            if broken is None or event.generation <= broken:
                continue
            if isinstance(event, v.MembershipDecided):
                track.decided_us = track.decided_us or now_us
            elif isinstance(event, v.StepCommitted):
                track.stepped_us.setdefault(event.task, now_us)
            elif len(track.parts) < _CHILDREN_MAX:
                about = _attributes(task=event.task, node=event.node, worker=event.worker)
                about |= {
                    "unicron.source": event.source,
                    "unicron.micro_batches_assigned": event.micro_batches_assigned,
                }
                track.parts.append(_SpanDraft("WorkerJoinedGroup", now_us - event.duration_us, now_us, about))

    def _open_command(self, state: ClusterState, command: v.Command, now_us: int) -> None:
        task, node = _task_of(command), command.node
        during = (
            name
            for name, candidate in state.incidents.items()
            if task in candidate.generations or candidate.node == node
        )
        incident = next(during, "")
        about = {"unicron.command": command.command_id} | _attributes(task=task, node=node, worker=_worker_of(command))
        self._await(command.command_id, _PendingCommand(type(command).__name__, about, now_us, incident))
        for worker in _started_by(command):
            about = _attributes(task=task, node=node, worker=worker)
            self._await(worker, _PendingCommand("worker start", about, now_us, incident))

    def _await(self, key: str, order: _PendingCommand) -> None:
        if len(self._orders) >= _ORDERS_MAX:
            del self._orders[next(iter(self._orders))]
        self._orders[key] = order

    def _close_command(self, key: str, now_us: int, error: str) -> Iterator[Span]:
        order = self._orders.pop(key, None)
        if order is None:
            return
        part = _SpanDraft(order.name, order.given_us, now_us, order.about, error)
        track = self._tracks.get(order.incident)
        if track is None:
            trace = _number(16, "command", key, str(order.given_us))
            yield _span(part, trace, 0, key)
        elif len(track.parts) < _CHILDREN_MAX:
            track.parts.append(part)


def _is_over(state: ClusterState, incident: Incident, track: _Track) -> bool:
    """Return whether all tasks hit that still can have made a step."""
    return all(
        name in track.stepped_us or name not in state.tasks or state.tasks[name].status is not TaskStatus.ACTIVE
        for name in incident.generations
    )


def _of_incident(incident: Incident, track: _Track) -> Iterator[Span]:
    began_us = min(incident.occurred_us, incident.detected_us)
    resumed_us = incident.resumed_us or incident.closed_us
    decided_us = min(max(track.decided_us, incident.detected_us), resumed_us)
    ended_us = max([resumed_us, *track.stepped_us.values()])
    trace = _number(16, "incident", incident.id, str(incident.detected_us))
    about = _attributes(task=",".join(incident.tasks), node=incident.node, worker=incident.worker)
    about |= {"unicron.incident": incident.id, "unicron.severity": incident.severity.name}
    about |= {"unicron.response": incident.response, "unicron.message": incident.message}
    about |= {
        "unicron.micro_batches_repeated": incident.micro_batches_repeated,
        "unicron.iterations_lost": incident.iterations_lost,
    }
    error = f"{incident.kind}: {incident.message}"
    root = _span(_SpanDraft(f"incident {incident.kind}", began_us, ended_us, about, error), trace, 0, "incident")
    yield root
    phases = [(DETECTION, began_us, incident.detected_us)]
    if track.decided_us:
        phases += [(DECISION, incident.detected_us, decided_us), (REGROUPING, decided_us, resumed_us)]
    parent = root.span
    for name, start_us, end_us in phases:
        span = _span(_SpanDraft(name, start_us, end_us, {}), trace, root.span, name)
        yield span
        parent = span.span if name == REGROUPING else parent
    for task, stepped_us in track.stepped_us.items():
        part = _SpanDraft(FIRST_STEP, min(resumed_us, stepped_us), stepped_us, _attributes(task=task))
        yield _span(part, trace, root.span, f"{FIRST_STEP} {task}")
    for number, part in enumerate(track.parts):
        yield _span(part, trace, parent if part.name == "WorkerJoinedGroup" else root.span, str(number))


def _attributes(**about: str) -> dict[str, str | int]:
    """Return the attributes by which spans of workers are found, too (agents/fork_server/worker_process.py)."""
    return {f"unicron.{name}": value for name, value in about.items() if value}


def _started_by(command: v.Command) -> list[str]:
    """Return the workers that the command starts."""
    if isinstance(command, v.StartWorkers):
        return [f"{command.spec.name}.{start.number}" for start in command.starts]
    return [command.worker] if isinstance(command, v.StartWorker) else []


def _worker_of(command: v.Command) -> str:
    return str(getattr(command, "worker", ""))


def _task_of(command: v.Command) -> str:
    if isinstance(command, v.StartWorker | v.StartWorkers):
        return command.spec.name
    return str(getattr(command, "task", ""))


def _span(part: _SpanDraft, trace: int, parent: int, name: str) -> Span:
    number = _number(8, f"{trace:x}", name)
    return Span(
        trace, number, parent, part.name, part.start_us, max(part.start_us, part.end_us), part.about, part.error
    )


def _number(size_bytes: int, *of: str) -> int:
    digest = blake2b("\0".join(of).encode(), digest_size=size_bytes)
    return int.from_bytes(digest.digest()) or 1
