"""docs/design/lives.md, drawn from the tables of unicrond/core/state/worker_lifecycle.py and
unicrond/core/state/incident_lifecycle.py.

python -m tests.unicrond.life_diagrams        writes it anew
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from unicrond.core.state import incident_lifecycle as incident_life
from unicrond.core.state import worker_lifecycle as worker_life
from unicrond.core.state.incident_lifecycle import IncidentTrigger
from unicrond.core.state.state import WorkerStatus
from unicrond.events import vocabulary as v

DOCUMENT = Path(__file__).parents[2] / "docs" / "design" / "lives.md"

Moves = Mapping[str, Mapping[str | None, str | None]]

_B = IncidentTrigger
_REPORTS = (
    _B.SYMPTOM_OPENS,
    _B.CAUSE_OPENS,
    _B.FACT_JOINS,
    _B.CAUSE_NAMES,
)
#: The triggers that each event may be.
TRIGGERS: Mapping[type[v.AnyEvent], tuple[IncidentTrigger, ...]] = {
    v.ErrorReported: _REPORTS,
    v.HangSuspected: _REPORTS,
    v.CorruptionSuspected: _REPORTS,
    v.AcceleratorReported: _REPORTS,
    v.WorkerExited: _REPORTS,
    v.CommandFailed: _REPORTS,
    v.DeadlineExpired: (_B.TIME_IS_UP, *_REPORTS),
    v.NodeLost: (
        _B.SYMPTOM_OPENS,
        _B.CAUSE_OPENS,
        _B.TAKEN_OVER,
        _B.CAUSE_NAMES,
    ),
    v.NodesLost: (_B.CAUSE_OPENS, _B.FACT_JOINS, _B.TAKEN_OVER),
    v.SilenceHeld: (_B.SYMPTOM_OPENS,),
    v.NodeJoined: (
        _B.SYMPTOM_OPENS,
        _B.CAUSE_OPENS,
        _B.TAKEN_OVER,
        _B.CAUSE_NAMES,
    ),
    v.SilenceEnded: (_B.CAUSE_NAMES,),
    v.IncidentEscalated: (_B.WORKER_GIVEN_UP, _B.TAKEN_OVER),
    v.WorkersWithdrawn: (_B.WORKER_GIVEN_UP, _B.CAUSE_OPENS),
    v.NodeIsolated: (_B.NODE_ISOLATED,),
    v.TransitionCompleted: (_B.CLOSES,),
}

_WORKER = """\
A row is an event of the log, a column the worker's status when it comes. An empty field: the event changes nothing.
`-` in the first column: the state does not know the worker; as a result: the state forgets it.

* starting: its start is commanded, its process is not ready yet
* ready: it waits for a membership
* member: it is in the group of its generation
* parked: it has left its group at an iteration boundary
* stopping: its end is commanded
* lost: its node is gone, or its task has given it up; its process is stopped as soon as its node can be reached
"""
_INCIDENT = """\
A row is what can happen to an incident, a column the incident's phase before it. An empty field: it cannot happen then.
`-` in the first column: the incident is not there yet; as a result: another incident has taken it over.

* symptom: a broken connection (SEV3), which may turn out to be the echo of a death or of a lost node
* unexplained: nothing has explained it in time; the group is reattempted, or a worker given up
* caused: its root cause is known (SEV1, SEV2); a process that raised an error may end by itself
* overdue: its worker was given up, or should have ended and has not
* closed: every task that it hit has what the plan gives it
"""


def document() -> str:
    """The whole page."""
    worker: Moves = {event.__name__: row for event, row in worker_life.MOVES.items()}
    brought = {
        trigger: [event.__name__ for event, may in TRIGGERS.items() if trigger in may]
        for trigger in incident_life.IncidentTrigger
    }
    events = "\n".join(f"| {trigger} | {', '.join(names)} |" for trigger, names in brought.items())
    return "\n".join(
        [
            "# Lives",
            "",
            "The states of workers and incidents as the coordinator folds them from the log. Drawn from the tables in",
            "`unicrond/core/state/worker_lifecycle.py` and `unicrond/core/state/incident_lifecycle.py` by",
            "`python -m tests.unicrond.life_diagrams`; a test keeps this page true.",
            "",
            "## A worker",
            "",
            _diagram(worker),
            "",
            _WORKER,
            _table("event", worker, [None, *WorkerStatus]),
            "",
            "## An incident",
            "",
            _diagram(incident_life.MOVES),
            "",
            _INCIDENT,
            _table("trigger", incident_life.MOVES, [None, *incident_life.IncidentPhase]),
            "",
            "| trigger | one of these events |",
            "|---|---|",
            events,
            "",
        ]
    )


def _diagram(moves: Moves) -> str:
    """Mermaid: one arrow per pair of states, with all that leads along it. What changes nothing is left out."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for event, row in moves.items():
        for before, after in row.items():
            if before != after:
                arrows.setdefault((before or "[*]", after or "[*]"), []).append(event)
    lines = [f"    {before} --> {after}: {', '.join(events)}" for (before, after), events in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def _table(head: str, moves: Moves, states: Iterable[str | None]) -> str:
    states = list(states)
    lines = [f"| {head} | {' | '.join(state or '-' for state in states)} |", "|---" * (len(states) + 1) + "|"]
    for event, row in moves.items():
        told = [(row[state] or "-") if state in row else "" for state in states]
        lines.append(f"| {event} | {' | '.join(told)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
