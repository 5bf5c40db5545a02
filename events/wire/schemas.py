"""Schemas: what came into the vocabulary with which number, and how an event is written for readers of an older one.

Rules
-----
* The readers of a schema refuse what they do not know, whole events at a time. So a message says the lowest number that
  holds all that it says (`schema_of`).
* What is younger than schema 1 says so where it stands: a type by its `since`, a field or a value of a `Literal` by
  `Since` in its annotation (`field_defaults.py`). A younger field has a default and is left out of the bytes at that; a
  younger value names the older one that stands for it.
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

from unicrond.events.vocabulary import Event
from unicrond.events.vocabulary.field_defaults import Since

#: The newest schema: what this version reads, and writes to readers of it.
SCHEMA = 1
#: What every reader reads.
FIRST = 1

E = TypeVar("E", bound=Event)
V = TypeVar("V", bound=msgspec.Struct)
_VERSION_SCHEMA = re.compile(r"\bschema([1-9][0-9]{0,5})\b")


def told_version(version: str, schema: int) -> str:
    """Return `version` with the schema that its owner reads, as `NodeJoined` and `CoordinatorStarted` carry it.

    The text is free: readers of every schema take it.
    """
    return f"{version}{'.' if '+' in version else '+'}schema{schema}"


def spoken_schema(version: str) -> int:
    """Return the schema that the owner of a told version reads; FIRST where it names none."""
    fields = _VERSION_SCHEMA.search(version)
    return int(fields.group(1)) if fields else FIRST


def schema_of(event: Event) -> int:
    """Return the lowest schema whose readers can read all that `event` says."""
    return max(since(type(event)), _needs(event))


def lowered(event: E, schema: int) -> E | None:
    """Return `event` as readers of `schema` can read it; None where they cannot be told of it at all."""
    if since(type(event)) > schema:
        return None
    if _needs(event) <= schema:
        return event
    return typing.cast(E, _lower(event, schema))


def lowered_value(value: V, schema: int) -> V:
    """Return any struct with the events' parts in it as readers of `schema` can read them."""
    return value if _needs(value) <= schema else typing.cast(V, _lower(value, schema))


def beyond_schema(event: Event, schema: int) -> list[str]:
    """Return what of `event` readers of `schema` do not know: its type, or fields and values, as "field.field"."""
    if since(type(event)) > schema:
        return [type(event).__name__]
    return _beyond(event, lowered(event, schema), "")


def _beyond(value: Any, low: Any, path: str) -> list[str]:
    if isinstance(value, msgspec.Struct) and type(value) is type(low):
        names = value.__struct_fields__
        return [
            where
            for name in names
            for where in _beyond(getattr(value, name), getattr(low, name), f"{path}.{name}" if path else name)
        ]
    return [] if value == low else [path]


def readable(kind: type[Event], schema: int) -> bool:
    """Say whether readers of `schema` know the type."""
    return since(kind) <= schema


def since(kind: type[msgspec.Struct]) -> int:
    """Return the schema that brought the type."""
    return getattr(kind, "since", FIRST)


class _Field(NamedTuple):
    """A field that may hold something younger than its struct."""

    name: str
    since: int
    is_required: bool
    default: Any
    values: dict[str, tuple[int, str]]
    is_nested: bool


@functools.cache
def _watched(kind: type[msgspec.Struct]) -> tuple[_Field, ...]:
    """Return the fields of a struct that can make it need more than FIRST."""
    fields = []
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        parts = _parts(hints[field.name])
        marks = [part for part in parts if isinstance(part, Since)]
        values = {young: (mark.schema, older) for mark in marks for young, older in mark.instead}
        whole = [mark for mark in marks if not mark.instead]
        nested = any(_watched(part) for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct))
        if marks or nested:
            default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
            younger, is_required = (
                max([mark.schema for mark in whole], default=FIRST),
                any(mark.is_required for mark in whole),
            )
            fields.append(_Field(field.name, younger, is_required, default, values, nested))
    return tuple(fields)


def _parts(hint: Any) -> list[Any]:
    """Return the type, what it is made of, and the marks on them."""
    marks = list(getattr(hint, "__metadata__", ()))
    return [hint, *marks, *(part for argument in typing.get_args(hint) for part in _parts(argument))]


def _needs(value: Any) -> int:
    """Return the lowest schema that holds what a struct, or a collection of them, says."""
    if isinstance(value, msgspec.Struct):
        needs = FIRST
        for field in _watched(type(value)):
            content = getattr(value, field.name)
            if field.since > FIRST and content != field.default:
                needs = max(needs, field.since)
            if field.is_nested:
                needs = max(needs, _needs(content))
            if field.values:
                needs = max(needs, *(field.values[text][0] for text in _texts(content) if text in field.values), FIRST)
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
            content = getattr(value, field.name)
            if field.since > schema and not field.is_required:
                content = field.default
            if field.is_nested:
                content = _lower(content, schema)
            if field.values:
                content = _older(content, field.values, schema)
            changes[field.name] = content
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(_lower(item, schema) for item in value)
    if isinstance(value, dict):
        return {key: _lower(item, schema) for key, item in value.items()}
    return value


def _older(value: Any, values: dict[str, tuple[int, str]], schema: int) -> Any:
    """Replace younger values; of a dict, leave out the items under younger keys."""
    if isinstance(value, tuple):
        return tuple(_older(item, values, schema) for item in value)
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key not in values or values[key][0] <= schema}
    return values[value][1] if value in values and values[value][0] > schema else value
