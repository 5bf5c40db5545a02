"""Golden bytes of every event type: one fixed example each, as it stands on the wire.

    python -m tests.golden.regenerate            # adds examples of new types, changes none
    python -m tests.golden.regenerate --replace  # writes all anew: only with a new schema number

A change of tests/golden/events.json in a review means: logs that were written before read differently now.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from tests.strategies import EVENT_TYPES
from unicrond.events.vocabulary import Command, CoordinatorStarted, Decision, Event, Request
from unicrond.events.wire.codec import API_PRODUCER, encode
from unicrond.events.wire.envelope import Envelope
from unicrond.events.wire.schemas import lowered

GOLDEN_PATH = Path(__file__).with_name("events.json")
#: Values that a field needs beyond its type.
FIXED: dict[str, Any] = {
    "node": "node-1",
    "task": "gpt",
    "worker": "gpt.3",
    "signal": None,
    "term": 2,
    "key": "U" + "A" * 55,
}


def example(kind: type[Event]) -> Envelope:
    """The example of one event type: every field set that came with it, optional ones too."""
    producer, term = "node-1", 0
    event = _value(inspect.type_info(kind), "")
    if issubclass(kind, Decision | Command):
        producer, term = "coordinator", 2
        if issubclass(kind, Command):
            event = msgspec.structs.replace(event, command_id=f"{term}.{event.epoch}.{event.node}.1")
        if issubclass(kind, CoordinatorStarted):
            event = msgspec.structs.replace(event, term=term)
    elif issubclass(kind, Request):
        producer = API_PRODUCER
    event = lowered(event, kind.since)  # what came later is left out of the bytes, and out of the examples
    return Envelope(
        producer=producer, boot=1_700_000_000_000_000, number=42, term=term, caused_by="node-2-7-1", based_on=41,
        observed_at_us=1_700_000_000_123_456, event=event,
    )  # fmt: skip


def golden() -> dict[str, dict[str, str]]:
    """What stands in the golden file: type -> {hex, repr}."""
    return json.loads(GOLDEN_PATH.read_text()) if GOLDEN_PATH.exists() else {}


def main() -> None:
    known = {} if "--replace" in sys.argv[1:] else golden()
    for kind in EVENT_TYPES:
        if kind.__name__ not in known:
            made = example(kind)
            known[kind.__name__] = {"hex": encode(made).hex(), "repr": repr(made)}
    GOLDEN_PATH.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def _value(info: inspect.Type, name: str) -> Any:
    if name in FIXED:
        return FIXED[name]
    match info:
        case inspect.StructType():
            written = [
                field for field in info.fields if field.default is msgspec.NODEFAULT
            ]  # see events/vocabulary/field_defaults.py
            return info.cls(**{field.name: _value(field.type, field.name) for field in written})
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 3
        case inspect.FloatType():
            return 0.25
        case inspect.StrType():
            if info.pattern is not None:
                return "gpt.3" if r"\." in info.pattern else "node-one" if "[a-z-]" in info.pattern else "node-1"
            return f"a {name or 'text'}"
        case inspect.LiteralType():
            return info.values[0]
        case inspect.VarTupleType():
            return (_value(info.item_type, ""),)
        case inspect.DictType():
            key = info.key_type.values[0] if isinstance(info.key_type, inspect.LiteralType) else "8"
            return {key: _value(info.value_type, "")}
        case inspect.UnionType():
            return _value(next(kind for kind in info.types if not isinstance(kind, inspect.NoneType)), "")
        case _:
            raise NotImplementedError(f"no example for {info}")


if __name__ == "__main__":
    main()
