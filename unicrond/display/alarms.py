"""Alarms as people see them: a row for each, with what somebody did about it. Pure.

The head makes the rows once, for the API, `unicronctl` and the page alike: nobody else words them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from unicrond.core.state.alarms import Alarm, AlarmHandling
from unicrond.core.state.state import ClusterState
from unicrond.display.tables import Table
from unicrond.events.vocabulary.phrases import span


class AlarmRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An alarm as the API tells it: `alarm`, its key; what people did about it (AlarmHandling), and in words
    (`handling`)."""

    alarm: str
    text: str
    is_quiet: bool = False
    acknowledged_by: str = ""
    acknowledged_us: int = 0
    silenced_by: str = ""
    silenced_until_us: int = 0
    person: str = ""
    assigned_by: str = ""
    reason: str = ""
    handling: str = ""


def alarm_rows(state: ClusterState, alarms: Iterable[Alarm], now_us: int) -> list[dict[str, Any]]:
    """Return the alarms with what people did about them, those that are not quiet first. `now_us`: wall clock."""
    rows = [_row(alarm, state.alarms.get(alarm.key, AlarmHandling()), now_us) for alarm in alarms]
    return [msgspec.to_builtins(row) for row in sorted(rows, key=lambda row: row.is_quiet)]


def _row(alarm: Alarm, handling: AlarmHandling, now_us: int) -> AlarmRow:
    facts = {name: getattr(handling, name) for name in handling.__struct_fields__}
    if handling.silenced_until_us <= now_us:
        facts |= {"silenced_by": "", "silenced_until_us": 0}
    words = handling_words(handling, now_us)
    return AlarmRow(alarm=alarm.key, text=str(alarm), is_quiet=handling.is_quiet(now_us), handling=words, **facts)


def handling_words(handling: AlarmHandling, now_us: int) -> str:
    """Say what people did about an alarm; "": nobody did anything."""
    words = []
    if handling.acknowledged_us:
        words.append(f"acknowledged by {handling.acknowledged_by} {span(now_us - handling.acknowledged_us)} ago")
    if now_us < handling.silenced_until_us:
        rest = span(handling.silenced_until_us - now_us)
        words.append(f"silenced by {handling.silenced_by} for {rest} more")
    if handling.person:
        words.append(f"assigned to {handling.person}")
    return "; ".join(words)


def alarms_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Build the table of the alarms of the API."""
    cells = tuple((row["alarm"], row.get("handling") or "-", row["text"]) for row in rows)
    return Table(("alarm", "handling", "what"), cells, frozenset(), "no alarm")


def alarm_line(row: Mapping[str, Any]) -> str:
    """Return an alarm of the API (GET /v1/alarms, /healthz) in one line, with what people did about it."""
    return f"{row['text']} [{row['alarm']}{'; ' if row.get('handling') else ''}{row.get('handling', '')}]"
