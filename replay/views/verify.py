"""Verify: make every recorded decision again from the same inputs, and compare.

Rules
-----
* The inputs of a decision are in the log: the state at `based_on` (the last entry that the coordinator had
  folded), the policy of its term (in CoordinatorStarted), the answer of the exact planner. All events of one look
  of the coordinator have one `based_on`; they are compared event for event.
* A plan may have been requested and not be ready yet: then the batch holds no PlanAdopted, and is compared
  with what `decide` returns without the answer.
* What the coordinator's shell observed and appended as a decision is derived again by its own means: a
  deadline must have been open since the term's last decision; a lost or returned node must follow from the
  retained heartbeats (`beat_check.py`), else it is counted as not verifiable; so is the end of a repair command.
* Decisions of an old term are inert and not compared.
* The books close: goodput of the cluster and of each task is within 0 and 100 %, and so is each loss.
* Another version or configuration is not an error by itself; it is named, since it may explain a difference.

Pure: steps in, findings out. One pass over the log finds where decisions were based (`bases`), a second
one decides again (`Verifier`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from unicrond.core.decide import decide, needed_solves
from unicrond.core.nodes.drains import is_end_over
from unicrond.core.own_decisions import batches
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.replayer import LogStep
from unicrond.core.rules.admission import from_the_future, is_repetition
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy, Settings, settings_of
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.events.wire.schemas import spoken_schema, told_version
from unicrond.replay.views.beat_check import BeatCheck, Unverifiable, Verdict
from unicrond.service.coordinator.code_identity import code_version
from unicrond.views.goodput import GoodputTotals, account_step
from unicrond.views.goodput_report import open_report, reading, report
from unicrond.views.view import View

#: Decisions that the coordinator's shell makes of what it observes; `decide` makes all others.
OBSERVED = (
    v.DeadlineExpired,
    v.NodeLost,
    v.NodesLost,
    v.NodeReturned,
    v.SilenceHeld,
    v.SilenceEnded,
    v.RepairEnded,
    v.AlarmEnded,
)
_SOLUTIONS_MAX = 16
_NO_WAY: dict[str, Any] = {"method": "fresh", "duration_us": 0, "rows_reused": 0}


class Divergence(Exception):
    """The first decision that cannot be made again. `recorded` and `decided_again` are sentences.

    `differing`: fields of the first event that differs, as "PlanAdopted.waf: 3 -> 4"; empty where a whole event does.
    """

    def __init__(
        self,
        seq: int,
        based_on: int,
        recorded: Sequence[str],
        decided_again: Sequence[str],
        differing: Sequence[str] = (),
    ) -> None:
        super().__init__(f"entry {seq} (based on entry {based_on}) differs from today's decision")
        self.seq = seq
        self.based_on = based_on
        self.recorded = list(recorded)
        self.decided_again = list(decided_again)
        self.differing = list(differing)


@dataclass
class Findings:
    """The outcome of a verification: how much was compared. `books`: why goodput does not close; "" where it does.
    `notes`: versions, configurations and their changes, in the log's order."""

    entries: int = 0
    batches: int = 0
    decisions: int = 0
    deadlines: int = 0
    node_verdicts: int = 0
    unverifiable: list[str] = field(default_factory=list)
    inert: int = 0
    books: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class _DecisionBatch:
    """The events that one look of the coordinator appended. `open_deadlines`: the deadlines that may have passed before
    it."""

    based_on: int
    seq: int
    events: list[v.AnyEvent]
    open_deadlines: set[str]


def bases(entries: Iterable[Entry]) -> set[int]:
    """Return the entries on which the decisions among `entries` were based."""
    return {
        entry.envelope.based_on
        for entry in entries
        if isinstance(entry, RecordedEvent)
        and isinstance(entry.envelope.event, v.Decision | v.Command)
        and not isinstance(entry.envelope.event, v.CoordinatorStarted)
    }


class Verifier(View):
    """Verifies a log. Feed it every step in order, then call `finish`. Raises Divergence at the first difference.

    `needed`: where decisions were based (see `bases`). `beats`: the retained heartbeats, in order.
    """

    def __init__(self, needed: set[int], beats: Sequence[RecordedEvent] = ()) -> None:
        self.findings = Findings()
        self._state = ClusterState()
        self._needed = needed
        self._states: dict[int, ClusterState] = {}
        self._batch: _DecisionBatch | None = None
        self._settings: Settings | None = None
        self._open_deadlines: set[str] = set()
        self._solutions: dict[Problem, Solution] = {}
        self._survey: Survey | None = None
        self._beats = BeatCheck(beats)
        self._totals = GoodputTotals()
        self._keep_state()

    def feed(self, step: LogStep) -> None:
        """Verify the next step."""
        before, entry, after = step
        self.findings.entries += 1
        self._state = before
        self._totals = account_step(self._totals, step)
        if isinstance(entry, RecordedEvent):
            self._beats.advance(entry.recorded_at_us, self._state)
            self._judge(entry)
        self._state = after
        if isinstance(entry, RecordedEvent):
            event = entry.envelope.event
            if isinstance(event, v.CoordinatorStarted) and self._state.term > before.term:
                self._take_over(event, entry)
            elif isinstance(event, v.NodeJoined):
                self._beats.joined(event.node, entry.recorded_at_us)
            if not isinstance(event, v.StepCommitted):  # steps make no deadline stand
                self._open_deadlines |= self._deadline_ids(self._state)
        self._keep_state()

    def finish(self) -> Findings:
        """Verify the last batch after the last entry and the books, and return the findings."""
        self._close_batch(at_end=True)
        self.findings.books = open_report(report(reading(self._totals, self._state), self._state))
        return self.findings

    # --- terms -------------------------------------------------------------------------------

    def _take_over(self, event: v.CoordinatorStarted, entry: RecordedEvent) -> None:
        self._close_batch(at_end=True)
        note = f"term {event.term} from entry {entry.seq}: version {event.version}"
        if event.version not in (code_version(), told_version(code_version(), spoken_schema(event.version))):
            note += f" (this is version {code_version()})"
        before = self._settings
        if not event.policy:
            self._settings = Settings(Policy(), 1.0)
            note += ", no policy recorded: today's defaults are assumed"
        else:
            try:
                self._settings = settings_of(event.policy)
            except msgspec.ValidationError as error:
                raise Divergence(
                    entry.seq, entry.envelope.based_on, [note], [f"a policy that this version cannot follow: {error}"]
                ) from None
        note += _change(before, self._settings)
        self.findings.notes.append(note)
        self._open_deadlines = set()
        self._beats.take_over(self._settings, entry.recorded_at_us)

    # --- decisions ---------------------------------------------------------------------------

    def _judge(self, entry: RecordedEvent) -> None:
        event, envelope = entry.envelope.event, entry.envelope
        if not isinstance(event, v.Decision | v.Command) or isinstance(event, v.CoordinatorStarted):
            return
        if (
            envelope.term != self._state.term
            or is_repetition(self._state, envelope)
            or from_the_future(self._state, envelope)
        ):
            self.findings.inert += 1
            return
        batch = self._batch
        if batch is None or batch.based_on != envelope.based_on:
            self._close_batch(at_end=False)
            self._batch = batch = _DecisionBatch(envelope.based_on, entry.seq, [], self._open_deadlines)
            # A timer that fires before the next look at the state was set at this one, at the latest.
            based_on = self._states.get(envelope.based_on, self._state)
            self._open_deadlines = self._deadline_ids(based_on) | self._deadline_ids(self._state)
        batch.events.append(event)
        if isinstance(event, OBSERVED):
            self._verify_observed(entry, event, batch.open_deadlines)

    def _close_batch(self, *, at_end: bool) -> None:
        """Decide again, now that all of the batch has been read. `at_end`: of the term, where a crash may have cut
        it."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        state = self._states.pop(batch.based_on, None)
        for seq in [seq for seq in self._states if seq < batch.based_on]:
            del self._states[seq]
        if isinstance(batch.events[0], OBSERVED):
            return
        if state is None or batch.based_on >= batch.seq:
            raise Divergence(
                batch.seq, batch.based_on, _sentences(batch.events), ["nothing: it has no earlier entry as its basis"]
            )
        again = self._decide(state, answered=any(isinstance(event, v.PlanAdopted) for event in batch.events))
        ends = accumulate(len(part) for part in batches(again))
        cut = at_end and len(batch.events) in ends
        recorded, decided = _comparable(batch.events), _comparable(again[: len(batch.events)] if cut else again)
        if recorded != decided:
            sentences = _sentences(batch.events), _sentences(again)
            raise Divergence(batch.seq, batch.based_on, *sentences, _differing(recorded, decided))
        self.findings.batches += 1
        self.findings.decisions += len(batch.events)

    def _decide(self, state: ClusterState, *, answered: bool) -> list[v.AnyEvent]:
        survey = self._look_at(state)
        solutions: dict[Problem, Solution] = {}
        if answered:
            for problem in needed_solves(survey):
                solutions[problem] = self._solve(problem)
        return decide(survey, solutions)

    def _solve(self, problem: Problem) -> Solution:
        if problem not in self._solutions:
            while len(self._solutions) >= _SOLUTIONS_MAX:
                del self._solutions[next(iter(self._solutions))]
            self._solutions[problem] = solve(problem)
        return self._solutions[problem]

    # --- what the shell observed ----------------------------------------------------------------

    def _verify_observed(
        self,
        entry: RecordedEvent,
        event: v.DeadlineExpired | Verdict | v.RepairEnded | v.AlarmEnded,
        open_deadlines: set[str],
    ) -> None:
        based_on = entry.envelope.based_on
        if isinstance(event, v.DeadlineExpired):
            if event.deadline_id not in open_deadlines:
                raise Divergence(
                    entry.seq,
                    based_on,
                    [event.sentence()],
                    ["no such deadline existed; these did: " + (", ".join(sorted(open_deadlines)) or "none")],
                )
            self.findings.deadlines += 1
            return
        if isinstance(event, v.AlarmEnded):
            return  # which alarms stand is the head's to see, and nothing is decided by them
        if isinstance(event, v.RepairEnded):
            self.findings.unverifiable.append(f"entry {entry.seq}, {event.sentence()}: by an operator's command")
            return
        node = self._state.nodes.get(event.node) if isinstance(event, v.NodeLost) else None
        if node and is_end_over(node, entry.recorded_at_us):
            self.findings.node_verdicts += 1  # it follows from the log, whatever the heartbeats were
            return
        try:
            contradiction = self._beats.contradiction(event, entry.recorded_at_us)
        except Unverifiable as error:
            self.findings.unverifiable.append(f"entry {entry.seq}, {event.sentence()}: {error}")
            return
        if contradiction:
            raise Divergence(entry.seq, based_on, [event.sentence()], [contradiction])
        self.findings.node_verdicts += 1

    def _deadline_ids(self, state: ClusterState) -> set[str]:
        return set(deadlines(self._look_at(state)))

    def _look_at(self, state: ClusterState) -> Survey:
        self._survey = Survey(state, self._policy, self._survey)
        return self._survey

    @property
    def _policy(self) -> Policy:
        return self._settings.policy if self._settings is not None else Policy()

    def _keep_state(self) -> None:
        if self._state.seq in self._needed:
            self._states[self._state.seq] = self._state


def _differing(recorded: Sequence[v.AnyEvent], decided: Sequence[v.AnyEvent]) -> list[str]:
    """Return the fields in which the first two events of the same type that differ do so."""
    for event, event_again in zip(recorded, decided, strict=False):
        if type(event) is not type(event_again):
            return []
        if event != event_again:
            return [
                f"{type(event).__name__}.{name}: {getattr(event, name)!r} -> {getattr(event_again, name)!r}"
                for name in event.__struct_fields__
                if getattr(event, name) != getattr(event_again, name)
            ]
    return []


def _comparable(events: Sequence[v.AnyEvent]) -> list[v.AnyEvent]:
    """Return the events without what says how a plan was computed (from a table, in which time), and which command
    checks a node: these are no inputs."""
    bare = [msgspec.structs.replace(e, **_NO_WAY) if isinstance(e, v.PlanAdopted) else e for e in events]
    return [msgspec.structs.replace(e, argv=()) if isinstance(e, v.CheckNode) else e for e in bare]


def _change(before: Settings | None, now: Settings) -> str:
    """Describe what differs from the term before."""
    if before is None:
        return ""
    old, new = before.numbers(), now.numbers()
    changed = [f"{name} {old.get(name)} -> {new.get(name)}" for name in new if old.get(name) != new[name]]
    return f", configuration changed: {', '.join(changed)}" if changed else ""


def _sentences(events: Sequence[v.AnyEvent]) -> list[str]:
    return [f"{type(event).__name__}: {event.sentence()}" for event in events]
