"""Schemas: what came into the vocabulary with which number, and how an event is written for readers of an older one.

Rules
-----
* Schema 1 is what the first release wrote; its readers refuse what they do not know, whole events at a time. So a
  message says the lowest number that holds all that it says (`schema_of`), and nearly all of them say 1.
* A new type, field or value of a `Literal` stands here under the number of the schema that brought it. A younger field
  has a default and is left out of the bytes at that (`fields.py`); a younger value names the older one that stands for
  it.
* `lowered` gives the form that a reader of an older schema can read: younger fields at their defaults, younger values
  replaced, or None for a type that it does not know. A writer asks what its reader reads; no other part need know.
* Names here are never taken away: logs hold them.

What does not live here: messages of *older* schemas (`upcast.py`), unknown fields of newer ones (`tolerance.py`).
"""

from __future__ import annotations

import functools
import re
import typing
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from events import vocabulary
from events.vocabulary import Event

#: The newest schema: what this version reads, and writes to readers of it.
SCHEMA = 4
#: What every reader reads.
FIRST = 1

#: schema -> the event types that came with it.
TYPES: dict[int, tuple[str, ...]] = {
    2: (
        "CheckNode",
        "EntrySkipped",
        "NodeChecked",
        "PeersRemembered",
        "RepairEnded",
        "StopAsked",
        "StragglerObserved",
        "StragglerRecovered",
        "WorkerBusy",
        "WorkerWaits",
    ),
    3: ("MembershipPart", "PeersDecided", "StartWorkers"),
    4: (
        "DrainBegun",
        "ForgetRequested",
        "LeaveCluster",
        "MachineReported",
        "MaintenanceCancelled",
        "MaintenancePlanned",
        "NodeEnrolled",
        "NodeForgotten",
        "NodeLeaving",
        "NodeRevoked",
        "SaveFailed",
    ),
}
#: schema -> struct -> the fields that came to it.
FIELDS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "AcceleratorReported": ("needs",),
        "CommandFailed": ("reads",),
        "ErrorReported": ("lost",),
        "Fault": ("spared",),
        "Heartbeat": ("kept_back", "kept_back_us"),
        "TaskSpec": ("start_timeout_s",),
        "HangSuspected": ("busy", "told"),
        "SetMembership": ("stop",),
    },
    3: {
        "MembershipDecided": ("told",),
        "TaskAssignment": ("nodes", "replica_workers"),
    },
    4: {
        "AcceleratorReported": ("foretells",),
        "CheckNode": ("agent_boot",),
        "CoordinatorStarted": ("taken_us",),
        "DropState": ("agent_boot",),
        "Heartbeat": ("read_seq",),
        "InjectionRequested": ("by",),
        "LayoutSpec": ("ep", "micro_batch", "vpp"),
        "ModelSpec": ("precision",),
        "NodeCordoned": ("address", "agent_boot", "by", "empty_by_us", "until_return"),
        "NodeJoined": ("gpu", "since_boot", "users"),
        "NodeUncordoned": ("address", "agent_boot", "by"),
        "PlanAdopted": ("healthy_gpus",),
        "ReshapeRequested": ("by", "ep", "iterations", "lr", "micro_batch", "vpp"),
        "SetMembership": ("agent_boot",),
        "SetPeers": ("agent_boot",),
        "StartWorker": ("agent_boot",),
        "StartWorkers": ("agent_boot",),
        "StepCommitted": ("checksums",),
        "StopWorker": ("agent_boot",),
        "TaskCancelled": ("by",),
        "TaskAssignment": ("ep", "micro_batch", "pp", "tp", "vpp"),
        "TaskReshaped": ("ep", "iterations", "lr", "micro_batch", "plan", "vpp"),
        "TaskSpec": ("ep", "gpus", "layouts", "preload", "run_as", "secrets", "vpp"),
        "TaskSubmitted": ("by",),
        "ToldOnce": ("lead_tells",),
        "TransitionCompleted": ("micro_batches_lost",),
        "WorkerExited": ("computed", "iteration"),
        "WorkerRegrouped": ("others_dealt",),
    },
}
#: schema -> alias of a Literal in the vocabulary -> its new values, each with the older one that stands for it.
VALUES: dict[int, dict[str, dict[str, str]]] = {
    2: {
        "Phase": {"busy": "unknown", "done": "unknown"},
        "ErrorKind": {"left_early": "process_exit"},
    },
}

#: From here on nodes read a task's memberships from the decisions themselves, and are told of them by no command.
TOLD_ONCE = 3
#: From here on the lead's word that a group has met stands for all members that keep their state.
LEAD_TELLS = 4
#: From here on the built-in GPT can have 16-bit parameters; older agents' workers would train in fp32.
BF16 = 4
#: From here on a plan may choose a task's layout, and vpp and ep are the task's own.
CHOOSES_LAYOUTS = 4
#: From here on nodes may say what type of GPU they have, and plans keep the types apart.
GPU_TYPES = 4
#: From here on a request says whose token came with it.
NAMES_WHO_ASKS = 4
#: From here on a task may name the user that it runs as, and its variables are looked at.
TASK_USERS = 4
#: What is never left out: an agent that does not know it must refuse the command, not obey the rest.
KEPT = {"TaskSpec": ("run_as",)}

E = TypeVar("E", bound=Event)
V = TypeVar("V", bound=msgspec.Struct)
_SPOKEN = re.compile(r"\bschema([1-9][0-9]{0,5})\b")


def told_version(version: str, schema: int) -> str:
    """`version` with the schema that its owner reads, as `NodeJoined` and `CoordinatorStarted` carry it.

    The text is free, so that readers of schema 1 take it too.
    """
    return f"{version}{'.' if '+' in version else '+'}schema{schema}"


def spoken_schema(version: str) -> int:
    """The schema that the owner of a told version reads; FIRST where it names none."""
    found = _SPOKEN.search(version)
    return int(found.group(1)) if found else FIRST


def schema_of(event: Event) -> int:
    """The lowest schema whose readers can read all that `event` says."""
    return max(since(type(event)), _needs(event))


def lowered(event: E, schema: int) -> E | None:
    """`event` as readers of `schema` can read it; None where they cannot be told of it at all."""
    if since(type(event)) > schema:
        return None
    if _needs(event) <= schema:
        return event
    return typing.cast(E, _lower(event, schema))


def lowered_value(value: V, schema: int) -> V:
    """Any struct with the events' parts in it as readers of `schema` can read them."""
    return value if _needs(value) <= schema else typing.cast(V, _lower(value, schema))


def beyond_schema(event: Event, schema: int) -> list[str]:
    """What of `event` readers of `schema` do not know: its type, or fields and values, as "field.field"."""
    if since(type(event)) > schema:
        return [type(event).__name__]
    return _beyond(event, lowered(event, schema), "")


def _beyond(value: Any, low: Any, path: str) -> list[str]:
    if isinstance(value, msgspec.Struct) and type(value) is type(low):
        names = value.__struct_fields__
        return [
            what
            for name in names
            for what in _beyond(getattr(value, name), getattr(low, name), f"{path}.{name}" if path else name)
        ]
    return [] if value == low else [path]


def readable(kind: type[Event], schema: int) -> bool:
    """Whether readers of `schema` know the type."""
    return since(kind) <= schema


def since(kind: type[Event]) -> int:
    """The schema that brought the type."""
    return next((schema for schema, names in TYPES.items() if kind.__name__ in names), FIRST)


class _Field(NamedTuple):
    """What there is to know of a field that may hold something younger than its struct."""

    name: str
    since: int
    default: Any
    values: dict[str, tuple[int, str]]
    is_nested: bool


@functools.cache
def _watched(kind: type) -> tuple[_Field, ...]:
    """The fields of a struct that can make it need more than FIRST."""
    found = []
    info = typing.cast(inspect.StructType, inspect.type_info(kind))
    for field in info.fields:
        since = next((n for n, structs in FIELDS.items() if field.name in structs.get(kind.__name__, ())), FIRST)
        values: dict[str, tuple[int, str]] = {}
        nested = False
        for part in _parts(field.type):
            if isinstance(part, inspect.LiteralType):
                values.update(_young_values(part))
            elif isinstance(part, inspect.StructType):
                nested = nested or bool(_watched(part.cls))
        if since > FIRST or values or nested:
            default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
            found.append(_Field(field.name, since, default, values, nested))
    return tuple(found)


def _young_values(literal: inspect.LiteralType) -> dict[str, tuple[int, str]]:
    return {
        value: (schema, older)
        for schema, aliases in VALUES.items()
        for alias, values in aliases.items()
        if set(typing.get_args(getattr(vocabulary, alias))) == set(literal.values)
        for value, older in values.items()
    }


def _parts(info: inspect.Type) -> list[inspect.Type]:
    """The type and, of tuples, dicts and unions, what they are made of."""
    match info:
        case inspect.UnionType():
            return [part for kind in info.types for part in _parts(kind)]
        case inspect.VarTupleType():
            return _parts(info.item_type)
        case inspect.DictType():
            return _parts(info.key_type) + _parts(info.value_type)
        case _:
            return [info]


def _needs(value: Any) -> int:
    """The lowest schema that holds what a struct, or a collection of them, says."""
    if isinstance(value, msgspec.Struct):
        needs = FIRST
        for field in _watched(type(value)):
            held = getattr(value, field.name)
            if field.since > FIRST and held != field.default:
                needs = max(needs, field.since)
            if field.is_nested:
                needs = max(needs, _needs(held))
            if field.values:
                needs = max(needs, *(field.values[text][0] for text in _texts(held) if text in field.values), FIRST)
        return needs
    if isinstance(value, tuple):
        return max(map(_needs, value), default=FIRST)
    if isinstance(value, dict):
        return max(map(_needs, value.values()), default=FIRST)
    return FIRST


def _texts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | dict) else (value,)


def _lower(value: Any, schema: int) -> Any:
    if isinstance(value, msgspec.Struct):
        changes = {}
        for field in _watched(type(value)):
            held = getattr(value, field.name)
            if field.since > schema and field.name not in KEPT.get(type(value).__name__, ()):
                held = field.default
            if field.is_nested:
                held = _lower(held, schema)
            if field.values:
                held = _older(held, field.values, schema)
            changes[field.name] = held
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(_lower(item, schema) for item in value)
    if isinstance(value, dict):
        return {key: _lower(item, schema) for key, item in value.items()}
    return value


def _older(value: Any, values: dict[str, tuple[int, str]], schema: int) -> Any:
    """Younger values replaced; of a dict, the items under younger keys are left out."""
    if isinstance(value, tuple):
        return tuple(_older(item, values, schema) for item in value)
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key not in values or values[key][0] <= schema}
    return values[value][1] if value in values and values[value][0] > schema else value
