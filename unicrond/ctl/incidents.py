"""`unicronctl incidents`, `alarms`, `acknowledge`, `silence`, `assign`: what went wrong, by cause and program signature
(views/incident_groups.py); what needs somebody, and who cares for it (core/state/alarms.py)."""

from __future__ import annotations

import argparse
from typing import Any

from unicrond.core.state.state import ClusterState, Severity
from unicrond.ctl.client import Snapshot
from unicrond.ctl.client_options import client_of, now_us, print_json, snapshot_of
from unicrond.display.alarms import alarms_table
from unicrond.display.cluster_tables import incidents_table
from unicrond.display.tables import Table, show
from unicrond.events.vocabulary.phrases import span, to_the_second
from unicrond.views.incident_groups import IncidentGroup, incident_groups

#: Names in a cell.
_NAMES_MAX = 4


def incidents(options: argparse.Namespace) -> None:
    """Show the incidents, open and closed: a row for each cause, or with --each for each of them."""
    snapshot = snapshot_of(options)
    groups = groups_of(snapshot.state)
    if options.json:
        print_json(group_rows(snapshot, groups))
    elif options.each:
        show(incidents_table(snapshot.state, now_us(options, snapshot.state)))
    else:
        show(groups_table(groups))


def alarms(options: argparse.Namespace) -> None:
    """Show the alarms that stand, and who cares for them."""
    rows = client_of(options).alarms()
    if options.json:
        print_json(rows)
    else:
        show(alarms_table(rows))


def handle_alarm(options: argparse.Namespace) -> None:
    """Acknowledge, silence or assign an alarm."""
    order = {name: getattr(options, name) for name in ("for_s", "person", "reason") if hasattr(options, name)}
    answer = client_of(options).handle_alarm(options.alarm, options.command, **order)
    if options.json:
        print_json(answer)
        return
    outcomes = {"acknowledge": "is acknowledged", "silence": "is silenced", "assign": "is assigned"}
    length = f" for {span(int(answer['for_s'] * 1e6))}" if "for_s" in answer else ""
    person = f" to {answer['person']}" if "person" in answer else ""
    print(f"alarm {answer['alarm']} {outcomes[options.command]}{length}{person}")


def groups_of(state: ClusterState) -> list[IncidentGroup]:
    """Return the groups of the incidents that the state has: all that are open, and the last that were closed."""
    return incident_groups((*state.closed_incidents, *state.incidents.values()))


def group_rows(snapshot: Snapshot, groups: list[IncidentGroup]) -> list[dict[str, Any]]:
    """Return a row for each group, with its incidents as the API gives them, oldest first."""
    state = snapshot.body["state"]
    bodies = {body["id"]: body for body in (*state["closed_incidents"], *state["incidents"].values())}
    return [
        {name: getattr(group, name) for name in IncidentGroup.__struct_fields__}
        | {"incidents": [bodies[name] for name in group.ids]}
        for group in groups
    ]


def groups_table(groups: list[IncidentGroup]) -> Table:
    """Build the table of the groups."""
    headers = ("cause", "sev", "count", "open", "first", "last", "tasks", "nodes", "last one", "what")
    rows = tuple(
        (
            group.cause,
            Severity(group.severity).name,
            str(group.count),
            str(group.unhealed) if group.unhealed else "-",
            to_the_second(group.first_us),
            to_the_second(group.last_us),
            _names(group.tasks),
            _names(group.nodes),
            group.ids[-1],
            group.label,
        )
        for group in groups
    )
    return Table(headers, rows, frozenset({"count", "open"}), "no incident")


def _names(names: tuple[str, ...]) -> str:
    more = f" +{len(names) - _NAMES_MAX}" if len(names) > _NAMES_MAX else ""
    return f"{', '.join(names[:_NAMES_MAX])}{more}" or "-"
