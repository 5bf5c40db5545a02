"""The state in bytes and in JSON: what digests are made of, what snapshots hold, what `GET /v1/state` answers.

Rules
-----
* There a task is flat: the fields of all its parts stand beside each other in TASK_FIELDS' order, which is the order
  in which they came to be. So how tasks are cut into parts (task_parts.py) is nothing that a digest can see.
* A field that is renamed keeps its key (`msgspec.field(name=...)`): bytes and JSON stay what they were.
* A new field goes to the end of TASK_FIELDS and has a default that is left out (events/vocabulary/field_defaults.py):
  the digests of all states before it stay what they were.
"""

from __future__ import annotations

import hashlib
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import fields

from unicrond.core.state.ordered_map import OrderedMap, ordered, plain
from unicrond.core.state.state import DERIVED, ClusterState, Task

#: Where each field of a flat task stands in a Task.
TASK_FIELDS: tuple[str, ...] = (
    "spec",
    "status",
    "submitted_seq",
    "submitted_us",
    "workers",
    "membership",
    "numbers.next_worker",
    "numbers.next_replica",
    "progress.iteration",
    "progress.best_iteration",
    "progress.committed_generation",
    "progress.loss",
    "progress.first_loss",
    "progress.first_commit_us",
    "progress.last_commit_us",
    "pace.iteration_us",
    "progress.checkpoint_iteration",
    "troubles.strikes",
    "troubles.stuck",
    "troubles.struck_below",
    "group.reattempts",
    "troubles.ends",
    "troubles.breaks",
    "group.formed_after",
    "group.suspicions",
    "pace.timings",
    "pace.warm",
    "pace.measurements",
    "pace.transition_us",
    "reshaping.reshape",
    "reshaping.reshaped_us",
    "copies.peers",
    "copies.holdings",
    "ending.params_digest",
    "ending.reason",
    "troubles.unclear",
    "group.unread",
    "group.stragglers",
    "ending.stop",
    "ending.loop_exits",
    "troubles.early",
    "troubles.early_below",
    "group.meetings",
    "group.overdue",
    "group.telling",
    "group.lead_confirmed",
    "group.before",
    "progress.unsaved",
    "pace.elsewhere",
    "pace.reshape_us",
    "pace.move_us",
    "reshaping.plan",
    "reshaping.since_us",
    "turn.waits_since_us",
    "turn.overdue_us",
    "turn.turn_since_us",
    "turn.turn_over_us",
    "pace.gpu",
    "pace.on_gpus",
    "group.probing",
)


def digest(state: ClusterState) -> str:
    """Return 16 bytes of BLAKE2b, in hex, over the state's canonical msgpack: equal states, equal digests."""
    encoded = msgspec.msgpack.encode(_flat(state), order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def to_json(state: ClusterState) -> Any:
    """Return the state as plain JSON types."""
    return msgspec.to_builtins(_flat(state))


def from_json(tree: Any) -> ClusterState:
    """Read the state of `to_json` back. Raise msgspec.ValidationError."""
    return _cut(msgspec.convert(tree, _FlatState, strict=True))


def encode(state: ClusterState) -> bytes:
    """Return the state as msgpack that keeps insertion order, which is part of the state."""
    return msgspec.msgpack.encode(_flat(state))


def decode(body: bytes) -> ClusterState:
    """Read the state of `encode` back. Raise msgspec.MsgspecError."""
    return _cut(msgspec.msgpack.decode(body, type=_FlatState))


# --- the flat forms ------------------------------------------------------------------------------


def _field(owner: type[msgspec.Struct], path: str) -> tuple[str, Any, Any]:
    """Return name, type and default (with its key) of the field at `path`, which may lead through a part."""
    part, _, name = path.rpartition(".")
    infos = {info.name: info for info in fields(owner)}
    if part:
        return _field(infos[part].type, name)
    info = infos[name]
    if info.default_factory is not msgspec.NODEFAULT:
        return name, info.type, msgspec.field(default_factory=info.default_factory, name=info.encode_name)
    return name, info.type, msgspec.field(default=info.default, name=info.encode_name)


_FlatTask = msgspec.defstruct(
    "_FlatTask", [_field(Task, path) for path in TASK_FIELDS], frozen=True, omit_defaults=True
)
#: The key of each of TASK_FIELDS in bytes and in JSON: its name there, or the older one that a renamed field keeps.
TASK_KEYS = tuple(info.encode_name for info in fields(_FlatTask))
_STATE_FIELDS = tuple(info.name for info in fields(ClusterState) if info.name not in DERIVED)
_FlatState = msgspec.defstruct(
    "_FlatState",
    [
        (name, dict[str, _FlatTask] if name == "tasks" else kind, default)  # type: ignore[valid-type]
        for name, kind, default in [_field(ClusterState, name) for name in _STATE_FIELDS]
    ],
    frozen=True,
    omit_defaults=True,
)
_values_of_task = attrgetter(*TASK_FIELDS)
_values_of_state = attrgetter(*_STATE_FIELDS)
_TASKS = _STATE_FIELDS.index("tasks")
_PARTS = {info.name: info.type for info in fields(Task) if info.name not in (*TASK_FIELDS, *DERIVED)}


def _flat(state: ClusterState) -> Any:
    values = [_plain(value) for value in _values_of_state(state)]
    values[_TASKS] = {name: _FlatTask(*map(_plain, _values_of_task(task))) for name, task in state.tasks.items()}
    return _FlatState(*values)


def _plain(value: Any) -> Any:
    return plain(value) if isinstance(value, OrderedMap) else value


def _cut(flat: Any) -> ClusterState:
    values = [_cheap(value) for value in _values_of_state(flat)]
    values[_TASKS] = {name: _cut_task(task) for name, task in flat.tasks.items()}
    return ClusterState(**dict(zip(_STATE_FIELDS, values, strict=True)))


def _cut_task(flat: Any) -> Task:
    values: dict[str, Any] = {}
    for path in TASK_FIELDS:
        part, _, name = path.rpartition(".")
        (values.setdefault(part, {}) if part else values)[name] = _cheap(getattr(flat, name))
    return Task(**{name: _PARTS[name](**value) if name in _PARTS else value for name, value in values.items()})


def _cheap(value: Any) -> Any:
    return ordered(value) if isinstance(value, dict) else value
