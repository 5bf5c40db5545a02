"""The vocabulary as it is, in plain values: what the frozen lists of older schemas are compared with.

python -m tests.golden.schemas > tests/golden/schema_<number>.json   # once, when a release freezes its schema
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from unicrond.events.vocabulary import AnyEvent
from unicrond.events.wire.envelope import Envelope

Described = dict[str, Any]


def described() -> Described:
    """`types`: the events; `structs`: struct -> field -> its type in words and its values, if these are listed."""
    structs: dict[str, dict[str, Described]] = {}
    _describe(inspect.type_info(Envelope), structs)
    del structs["Envelope"]["schema"]  # its bound is the schema itself
    return {"types": sorted(kind.__name__ for kind in typing.get_args(AnyEvent)), "structs": structs}


def frozen(schema: int) -> Described:
    """The vocabulary of that schema, as its release froze it."""
    found: Described = json.loads(Path(__file__).with_name(f"schema_{schema}.json").read_text())
    return found


def _describe(info: inspect.Type, structs: dict[str, dict[str, Described]]) -> Described:
    """One type: `kind`, and what bounds it. Struct types that it holds are added to `structs`."""
    match info:
        case inspect.StructType():
            name = info.cls.__name__
            if name not in structs:
                structs[name] = {}
                for field in info.fields:
                    structs[name][field.name] = {**_describe(field.type, structs), "required": field.required}
            return {"kind": name}
        case inspect.LiteralType():
            return {"kind": "literal", "values": sorted(info.values, key=str)}
        case inspect.UnionType():
            parts = [_describe(part, structs) for part in info.types]
            if len(parts) > 8:
                return {"kind": "event"}  # the types themselves are listed
            return {"kind": "union", "of": sorted(parts, key=lambda part: json.dumps(part, sort_keys=True))}
        case inspect.VarTupleType():
            return {"kind": "tuple", "of": [_describe(info.item_type, structs)]}
        case inspect.DictType():
            return {"kind": "dict", "of": [_describe(part, structs) for part in (info.key_type, info.value_type)]}
        case _:
            bounds = {name: value for name, value in msgspec.structs.asdict(info).items() if value is not None}
            return {"kind": type(info).__name__.removesuffix("Type").lower(), **bounds}


if __name__ == "__main__":
    now = described()
    lines = (
        f" {json.dumps(name)}: {json.dumps(now['structs'][name], sort_keys=True)}" for name in sorted(now["structs"])
    )
    print('{"structs": {\n' + ",\n".join(lines) + '\n},\n"types": ' + json.dumps(now["types"]) + "}")
