"""The state in bytes and in JSON: what digests are made of, what snapshots hold, what `GET /v1/state` answers.

Rules
-----
* There a task is flat, and so is a node: the fields of all its parts stand beside each other in the order of
  TASK_FIELDS or NODE_FIELDS, which is the order in which they came to be. So how they are cut into parts
  (task_parts.py, node_parts.py) is nothing that a digest can see.
* A field that is renamed keeps its key (`msgspec.field(name=...)`): bytes and JSON stay what they were.
* A new field goes to the end of its list and has a default that is left out (events/vocabulary/field_defaults.py): the
  digests of all states before it stay what they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, get_origin

import msgspec
from msgspec.structs import fields

from unicrond.core.state.ordered_map import OrderedMap, ordered, plain
from unicrond.core.state.state import DERIVED, ClusterState, Node, Task

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
    "pace.warm_up_reports",
    "pace.measurements",
    "pace.transition_us",
    "reshaping.reshape",
    "reshaping.reshaped_us",
    "copies.peers",
    "copies.holdings",
    "ending.params_digest",
    "ending.reason",
    "troubles.unclear_breaks",
    "group.unread_generation",
    "group.stragglers",
    "ending.stop",
    "ending.loop_exits",
    "troubles.crashes",
    "troubles.deaths",
    "group.meetings",
    "group.overdue_generation",
    "group.membership_parts",
    "group.lead_confirmed",
    "group.last_membership",
    "progress.save_failures",
    "progress.unsaved_since_us",
    "pace.other_layouts",
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
    "owner",
    "updated_us",
    "progress.trained_us",
    "progress.iterations_repeated",
    "progress.repeats_until",
    "progress.repeats_for",
    "pace.circumstances",
    "pace.revised_us",
    "pace.start_us",
    "pace.starting_since_us",
    "group.probing",
    "troubles.local_faults",
    "troubles.convictions_us",
    "troubles.evictions_us",
    "mode",
    "pace.unplain_reports",
    "group.leads",
    "group.accusations",
    "copies.carriers",
    "group.divergence_reports",
    "troubles.divergence",
    "troubles.proof",
)

#: Where each field of a flat node stands in a Node.
NODE_FIELDS: tuple[str, ...] = (
    "name",
    "status",
    "slots",
    "slots_max",
    "address",
    "store",
    "agent.boot",
    "joined_us",
    "agent.version",
    "isolation.active",
    "isolation.over",
    "isolation.count",
    "cordon.active",
    "cordon.draining",
    "cordon.reason",
    "health.returns_us",
    "reason",
    "commands",
    "memory",
    "agent.schema",
    "agent.unreadable_commands",
    "health.is_loss_excused",
    "isolation.probation",
    "health.repair_need",
    "users",
    "departure.announced",
    "cordon.until_return",
    "cordon.empty_by_us",
    "cordon.overdue",
    "cordon.window",
    "health.failure_forecast",
    "health.suspicion",
    "departure.left_us",
    "departure.removal",
    "departure.leave_ordered",
    "gpu",
    "probe_port",
    "domain",
    "object_stores",
    "strays",
    "departure.ends_us",
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
    """Return type and default (with its key) of the field at `path`, which may lead through a part; its name first."""
    part, _, name = path.rpartition(".")
    infos = {info.name: info for info in fields(owner)}
    if part:
        return path.replace(".", "_"), *_field(infos[part].type, name)[1:]
    info = infos[name]
    if info.default_factory is not msgspec.NODEFAULT:
        return name, info.type, msgspec.field(default_factory=info.default_factory, name=info.encode_name)
    return name, info.type, msgspec.field(default=info.default, name=info.encode_name)


class _FlatForm:
    """The flat struct of a struct in parts, and the ways to it and back. `paths`: where its fields stand in `owner`."""

    def __init__(self, owner: type[msgspec.Struct], paths: tuple[str, ...]) -> None:
        self._owner = owner
        self._paths = [path.rpartition(".")[::2] for path in paths]
        self._parts = {info.name: info.type for info in fields(owner) if info.name not in (*paths, *DERIVED)}
        self.struct: Any = msgspec.defstruct(
            f"_Flat{owner.__name__}", [_field(owner, path) for path in paths], frozen=True, omit_defaults=True
        )
        self.keys = tuple(info.encode_name for info in fields(self.struct))
        self._values = attrgetter(*paths)
        self._has_maps = any(get_origin(info.type) is Mapping for info in fields(self.struct))
        self._flat_values = attrgetter(*[info.name for info in fields(self.struct)])

    def flat(self, items: Mapping[str, Any]) -> dict[str, Any]:
        """Return the items in the flat form."""
        struct, values = self.struct, self._values
        if not self._has_maps:
            return {name: struct(*values(item)) for name, item in items.items()}
        return {name: struct(*map(_plain, values(item))) for name, item in items.items()}

    def cut(self, items: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flat items in parts."""
        return {name: self._cut(item) for name, item in items.items()}

    def _cut(self, flat: Any) -> Any:
        values: dict[str, Any] = {}
        for (part, name), value in zip(self._paths, self._flat_values(flat), strict=True):
            (values.setdefault(part, {}) if part else values)[name] = _cheap(value)
        parts = self._parts
        return self._owner(**{name: parts[name](**value) if name in parts else value for name, value in values.items()})


def _plain(value: Any) -> Any:
    return plain(value) if isinstance(value, OrderedMap) else value


def _cheap(value: Any) -> Any:
    return ordered(value) if isinstance(value, dict) else value


_FORMS = {"tasks": _FlatForm(Task, TASK_FIELDS), "nodes": _FlatForm(Node, NODE_FIELDS)}
#: The keys of TASK_FIELDS and NODE_FIELDS in bytes and in JSON: the names there, or the older ones that fields keep.
TASK_KEYS, NODE_KEYS = (form.keys for form in _FORMS.values())
#: A task and a node as they stand there.
FlatTask, FlatNode = (form.struct for form in _FORMS.values())
_STATE_FIELDS = tuple(info.name for info in fields(ClusterState) if info.name not in DERIVED)
_FlatState = msgspec.defstruct(
    "_FlatState",
    [
        (name, dict.__class_getitem__((str, _FORMS[name].struct)) if name in _FORMS else kind, default)
        for name, kind, default in [_field(ClusterState, name) for name in _STATE_FIELDS]
    ],
    frozen=True,
    omit_defaults=True,
)
_values_of_state = attrgetter(*_STATE_FIELDS)


def _flat(state: ClusterState) -> Any:
    values = dict(zip(_STATE_FIELDS, _values_of_state(state), strict=True))
    return _FlatState(
        *(_FORMS[name].flat(value) if name in _FORMS else _plain(value) for name, value in values.items())
    )


def _cut(flat: Any) -> ClusterState:
    values = dict(zip(_STATE_FIELDS, map(_cheap, _values_of_state(flat)), strict=True))
    values |= {name: ordered(form.cut(values[name])) for name, form in _FORMS.items()}
    return ClusterState(**values)
