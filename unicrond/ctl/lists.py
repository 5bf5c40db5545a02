"""What the commands of `unicronctl` print with `--json`: lists of rows, one row for each thing, and their schemas.

Rules
-----
* A list is a list, never a dict by name; a row has the name in a field of its own, under the name that a field of the
  same kind has on the wire.
* A row of a node, a task or a worker is its part of `GET /v1/state`, field by field; so is each incident of a group.
* `unicronctl schema` prints the JSON Schema that all of this is tested against.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec.structs import fields

from unicrond.core.state.state import Incident, TaskStatus, Window
from unicrond.core.state.state_bytes import FlatNode, FlatTask
from unicrond.core.state.workers import Worker
from unicrond.ctl.client import Snapshot
from unicrond.display.alarms import AlarmRow
from unicrond.display.cluster_tables import ranks_of
from unicrond.display.event_lines import EventLine
from unicrond.events.vocabulary import Name
from unicrond.views.incident_groups import IncidentGroup

Row: TypeAlias = dict[str, Any]


def _with(owner: type[msgspec.Struct], name: str, *more: tuple[Any, ...]) -> type[msgspec.Struct]:
    """Return a struct of `more` and of the fields of `owner`."""
    inherited = [
        (info.name, info.type, msgspec.field(default_factory=info.default_factory, name=info.encode_name))
        if info.default_factory is not msgspec.NODEFAULT
        else (info.name, info.type, msgspec.field(default=info.default, name=info.encode_name))
        for info in fields(owner)
    ]
    return msgspec.defstruct(name, [*more, *inherited], kw_only=True, omit_defaults=True, forbid_unknown_fields=True)


class FindingRow(msgspec.Struct, forbid_unknown_fields=True):
    """What `doctor` has found."""

    about: str
    problem: str
    fix: str


class NodeAnswer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the coordinator answers about one node. `seq`: the entry from which on it holds."""

    node: Name
    seq: int
    empty_by_us: int = 0
    workers_left: int = 0


class TaskAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """How a task stands that was waited for."""

    task: Name
    status: TaskStatus
    reached: bool


#: Command -> the type of its rows; of `events` each row is a line of its own.
ROWS: dict[str, type[msgspec.Struct]] = {
    "nodes": _with(FlatNode, "NodeRow"),
    "tasks": _with(
        FlatTask,
        "TaskRow",
        ("name", Name),
        ("waf", float | None),
        ("delivered_flop", float | None),
    ),
    "workers": _with(Worker, "WorkerRow", ("task", Name), ("rank", int | None)),
    "incidents": _with(IncidentGroup, "IncidentGroupRow", ("incidents", list[_with(Incident, "IncidentRow")])),  # type: ignore[misc]
    "alarms": AlarmRow,
    "events": EventLine,
    "doctor": FindingRow,
    "maintain": _with(Window, "WindowRow", ("window", str)),
    **dict.fromkeys(("cordon", "uncordon", "forget", "drain"), NodeAnswer),
    "wait": TaskAnswer,
}


def schema(command: str) -> Row:
    """Return the JSON Schema of what a command prints; of `events`, of one line."""
    row = ROWS[command]
    return msgspec.json.schema(row if command == "events" else list[row])  # type: ignore[valid-type]


def node_rows(snapshot: Snapshot) -> list[Row]:
    """Return the nodes."""
    return list(snapshot.body["state"]["nodes"].values())


def task_rows(snapshot: Snapshot) -> list[Row]:
    """Return the tasks, with what the coordinator derives: `waf`, in FLOP/s, and `delivered_flop`."""
    derived = snapshot.body.get("derived", {})
    return [
        {"name": name, **{key: derived.get(key, {}).get(name) for key in ("waf", "delivered_flop")}, **task}
        for name, task in snapshot.body["state"]["tasks"].items()
    ]


def worker_rows(snapshot: Snapshot, task: str | None) -> list[Row]:
    """Return the workers, of one task or of all."""
    return [
        {"task": name, "rank": ranks_of(snapshot.state.tasks[name]).get(worker), **record}
        for name, body in snapshot.body["state"]["tasks"].items()
        for worker, record in body["workers"].items()
        if task in (None, name)
    ]


def window_rows(snapshot: Snapshot) -> list[Row]:
    """Return the maintenance windows."""
    return [{"window": name, **window} for name, window in snapshot.body["state"].get("windows", {}).items()]
