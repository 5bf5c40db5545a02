"""Incidents by cause and by what their programs said: one row for what happened fifty times. Pure.

Rules
-----
* The cause is `hardware`, `unknown` or `program`, in this order: what a person has to look at comes first, and what a
  user's script has done fifty times is one row below it.
* Kinds that only a machine explains are hardware. An end of which the program's own last words tell (a line of Python's
  such as `FileNotFoundError: ...`) is the program's, whatever its kind. What is neither is unknown.
* Incidents of one kind are one group if their signatures are equal: the last words for a program, else the message,
  both without the names and numbers that differ each time. A program's words have the signature by which its crashes
  are told apart (core/faults/program_faults.py: no paths either); a signal's end is told apart by the function in
  which the process died, where it wrote that. Hardware is grouped by kind alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from unicrond.core.faults import program_faults
from unicrond.core.state.state import Incident
from unicrond.events.vocabulary.phrases import clean, count

Cause: TypeAlias = Literal["hardware", "unknown", "program"]
CAUSES: tuple[Cause, ...] = ("hardware", "unknown", "program")

_HARDWARE = frozenset(
    {
        "node_lost",
        "domain_lost",
        "ecc_error",
        "nvlink_error",
        "driver_error",
        "dma_error",
        "gpu_broken",
        "gpu_fault",
        "corruption",
    }
)
_PROGRAM = frozenset({"exception", "nan_loss", "data_error", "left_early"})
_LAST_WORDS = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Iteration)(?:: .*)?$")
#: Not the number of a signal or an exit code, nor a part of a word like SIGUSR1.
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|(?<!signal )(?<!code )(?<![\w.])\d+(?:\.\d+)?")
_SIGNATURE_MAX = 120


class IncidentGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Incidents of one cause. `first_us`, `last_us`: when the first and the last of them were detected. `severity`: the
    worst, 1 to 3. `ids`: oldest first. `unhealed`: those that are open."""

    cause: Cause
    kind: str
    signature: str
    count: int
    unhealed: int
    severity: int
    first_us: int
    last_us: int
    tasks: tuple[str, ...]
    nodes: tuple[str, ...]
    ids: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name the group in a few words."""
        return f"{self.kind}: {self.signature}" if self.signature else self.kind


def cause_of(incident: Incident) -> Cause:
    """Return what kind of cause the incident has."""
    if incident.kind in _HARDWARE:
        return "hardware"
    return "program" if incident.kind in _PROGRAM or last_words(incident) else "unknown"


def last_words(incident: Incident) -> str:
    """Return the line in which the program named its exception; "" where there is none."""
    lines = [clean(line) for line in f"{incident.message}\n{incident.log_tail}".splitlines()]
    return next((line for line in reversed(lines) if _LAST_WORDS.match(line)), "")


def signature_of(incident: Incident) -> str:
    """Return what incidents of one group have in common beside their kind."""
    if incident.kind in _HARDWARE:
        return ""
    if words := last_words(incident):
        return program_faults.signature_of(_without_names(incident, words))[:_SIGNATURE_MAX]
    text = _CHANGING.sub("#", _without_names(incident, clean(incident.message.partition("\n")[0])))
    place = program_faults.crash_place(incident.log_tail)
    return f"{text[: _SIGNATURE_MAX - len(place)]}{place}"


def _without_names(incident: Incident, text: str) -> str:
    for name in (incident.worker, incident.node, *incident.tasks):
        if name:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "*", text)
    return text


def incident_groups(incidents: Iterable[Incident]) -> list[IncidentGroup]:
    """Return the groups: by cause, then those with an open incident, then the latest."""
    members: dict[tuple[Cause, str, str], list[Incident]] = {}
    for incident in incidents:
        members.setdefault((cause_of(incident), incident.kind, signature_of(incident)), []).append(incident)
    groups = [_group(*key, group) for key, group in members.items()]
    return sorted(groups, key=lambda group: (CAUSES.index(group.cause), not group.unhealed, -group.last_us))


def groups_sentence(groups: Iterable[IncidentGroup]) -> str:
    """Count incidents by cause, in words."""
    counts = {cause: sum(group.count for group in groups if group.cause == cause) for cause in CAUSES}
    total = sum(counts.values())
    parts = ", ".join(f"{number} {cause}" for cause, number in counts.items() if number)
    return f"{count(total, 'incident')} ({parts})" if total else "no incident"


def _group(cause: Cause, kind: str, signature: str, incidents: list[Incident]) -> IncidentGroup:
    incidents = sorted(incidents, key=lambda incident: incident.detected_us)
    return IncidentGroup(
        cause=cause,
        kind=kind,
        signature=signature,
        count=len(incidents),
        unhealed=sum(not incident.closed_us for incident in incidents),
        severity=min(incident.severity.value for incident in incidents),
        first_us=incidents[0].detected_us,
        last_us=incidents[-1].detected_us,
        tasks=tuple(dict.fromkeys(task for incident in incidents for task in incident.tasks)),
        nodes=tuple(dict.fromkeys(incident.node for incident in incidents if incident.node)),
        ids=tuple(incident.id for incident in incidents),
    )
