"""What a newer version says beyond what this one knows: the fields that are no part of the vocabulary here.

Rules
-----
* An observation is a fact, and a fact with more to it than one understands is still a fact: its unknown fields are
  set aside and the rest is read as strictly as ever. The log keeps the bytes as they came (`RecordedEvent.body`).
* Decisions and commands stay strict: to obey half of an order is worse than to refuse it. A sender of orders writes
  them so that they can be read (`schemas.lowered`). The envelope is strict, too.
* An unknown type is not an event.
"""

from __future__ import annotations

import functools
import typing
from typing import Any

import msgspec
from msgspec import inspect

from unicrond.events.vocabulary import AnyObservation
from unicrond.events.wire.schemas import SCHEMA

_KINDS: dict[str, type[msgspec.Struct]] = {kind.__name__: kind for kind in typing.get_args(AnyObservation)}


def set_aside(body: bytes) -> tuple[bytes, tuple[str, ...]] | None:
    """Return an observation's bytes without the fields unknown here, and these, as "$.event.field = value".

    None where that changes nothing, or where it is not an observation. Raises msgspec's errors on what is not msgpack.
    """
    message = msgspec.msgpack.decode(body)
    event = message.get("event") if isinstance(message, dict) else None
    kind = _KINDS.get(event.get("type", "")) if isinstance(event, dict) and _is_text(event.get("type")) else None
    if kind is None:
        return None
    unknown: list[str] = []
    message["event"] = {"type": kind.__name__, **_known_part(event, _info(kind), "$.event", unknown)}
    schema = message.get("schema")
    is_newer = type(schema) is int and schema > SCHEMA
    if is_newer:
        message["schema"] = SCHEMA
    return (msgspec.msgpack.encode(message), tuple(unknown)) if unknown or is_newer else None


def without_unknown(value: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a tagged struct's plain map with the fields of `kind` alone, in the structs that it holds too."""
    return {"type": value.get("type"), **_known_part(value, _info(kind), "$", [])}


@functools.cache
def _info(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _known_part(value: Any, info: inspect.Type, path: str, unknown: list[str]) -> Any:
    """Return the plain value with the fields of `info` alone, in structs however deep; the others go to `unknown`."""
    match info:
        case inspect.StructType() if isinstance(value, dict):
            fields = {field.encode_name: field.type for field in info.fields}
            fields_here = fields.keys() | ({"type"} if path == "$.event" else set())
            unknown.extend(f"{path}.{name} = {inner!r}" for name, inner in value.items() if name not in fields_here)
            return {
                name: _known_part(inner, fields[name], f"{path}.{name}", unknown)
                for name, inner in value.items()
                if name in fields
            }
        case inspect.VarTupleType() if isinstance(value, list) and len(value) <= (info.max_length or len(value)):
            return [_known_part(item, info.item_type, f"{path}[{at}]", unknown) for at, item in enumerate(value)]
        case inspect.DictType() if isinstance(value, dict):
            return {
                key: _known_part(inner, info.value_type, f"{path}[{key!r}]", unknown) for key, inner in value.items()
            }
        case inspect.UnionType():
            structs = [kind for kind in info.types if isinstance(kind, inspect.StructType)]
            return _known_part(value, structs[0], path, unknown) if len(structs) == 1 else value
        case _:
            return value
