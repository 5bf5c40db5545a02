"""An incident's life: phase x trigger -> phase. A test checks `folding/` against this table.

| state | is |
|---|---|
| symptom | a broken connection (SEV3) that may turn out to be the echo of a death or of a lost node |
| unexplained | nothing has explained it in time: the group is reattempted, or a worker given up |
| caused | its root cause is known (SEV1, SEV2); a process that raised an error may end by itself |
| overdue | its worker was given up, or should have ended and has not |
| closed | every task that it hit has what the plan gives it |

`None`: it is not there (yet), or another incident has taken it over. When its tasks train again is noted
(`Incident.resumed_us`) and changes nothing of this.

`python -m tests.unicrond.life_diagrams` draws docs/design/lives.md from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from unicrond.core.state.state import Incident, Severity


class IncidentPhase(StrEnum):
    """See the table above."""

    SYMPTOM = "symptom"
    UNEXPLAINED = "unexplained"
    CAUSED = "caused"
    OVERDUE = "overdue"
    CLOSED = "closed"


class IncidentTrigger(StrEnum):
    """What can happen to an incident, in words."""

    SYMPTOM_OPENS = "a symptom opens it"
    CAUSE_OPENS = "a cause opens it"
    FACT_JOINS = "a fact joins it"
    CAUSE_NAMES = "a cause names it"
    TIME_IS_UP = "its time is up"
    WORKER_GIVEN_UP = "its worker is given up"
    NODE_ISOLATED = "its node is isolated"
    TAKEN_OVER = "a lost node, or a worker given up, explains it"
    CLOSES = "it is healed"


_P, _B = IncidentPhase, IncidentTrigger
_OPEN = (_P.SYMPTOM, _P.UNEXPLAINED, _P.CAUSED, _P.OVERDUE)

MOVES: Mapping[IncidentTrigger, Mapping[IncidentPhase | None, IncidentPhase | None]] = {
    _B.SYMPTOM_OPENS: {None: _P.SYMPTOM},
    _B.CAUSE_OPENS: {None: _P.CAUSED},
    _B.FACT_JOINS: {phase: phase for phase in _OPEN},
    _B.CAUSE_NAMES: dict.fromkeys(_OPEN, _P.CAUSED),
    _B.TIME_IS_UP: {
        _P.SYMPTOM: _P.UNEXPLAINED,
        _P.UNEXPLAINED: _P.UNEXPLAINED,
        _P.CAUSED: _P.OVERDUE,
        _P.OVERDUE: _P.OVERDUE,
    },
    _B.WORKER_GIVEN_UP: dict.fromkeys(_OPEN, _P.OVERDUE),
    _B.NODE_ISOLATED: {
        _P.SYMPTOM: _P.CAUSED,
        _P.UNEXPLAINED: _P.OVERDUE,
        _P.CAUSED: _P.CAUSED,
        _P.OVERDUE: _P.OVERDUE,
    },
    _B.TAKEN_OVER: dict.fromkeys(_OPEN),
    _B.CLOSES: dict.fromkeys(_OPEN, _P.CLOSED),
}


def phase(incident: Incident) -> IncidentPhase:
    """Return where the incident stands."""
    if incident.closed_us:
        return IncidentPhase.CLOSED
    if incident.severity is Severity.SEV3:
        return IncidentPhase.UNEXPLAINED if incident.is_overdue else IncidentPhase.SYMPTOM
    return IncidentPhase.OVERDUE if incident.is_overdue else IncidentPhase.CAUSED


def advance(incident: Incident, trigger: IncidentTrigger, **fields: Any) -> Incident:
    """Return the incident after this trigger, with these fields besides. KeyError where the table has no such move."""
    after = MOVES[trigger][phase(incident)]
    return replace(incident, is_overdue=after in (IncidentPhase.UNEXPLAINED, IncidentPhase.OVERDUE), **fields)
