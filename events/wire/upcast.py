"""Upcasters: messages of an older schema read as if they had been written today.

Rules
-----
* The log is never rewritten. What stands in it is raised to today's schema when it is read, one number at a
  time: `STEPS[n]` makes a message of schema n one of schema n + 1.
* A step works on the plain map of the wire and may change, add and drop fields. It never changes the producer
  (producer, boot, number), nor the type's name, node or task: subjects are made of these.
* A new number is due where an old message would be refused or mean something else. A new field with a default
  needs none: old messages have the default. (What an older version reads of newer messages: `schemas.py`.)
* With each new number comes a golden log of the last one, which must always fold to the same facts.
* Steps are pure and may raise on nonsense; the message is then quarantined like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from unicrond.events.wire.schemas import SCHEMA

Message: TypeAlias = dict[str, Any]
Step: TypeAlias = Callable[[Message], Message]

#: Schema number -> the step to the next.
STEPS: dict[int, Step] = {}


class _Numbered(msgspec.Struct):
    """A message of which only the schema's number is looked at."""

    schema: int


_numbered = msgspec.msgpack.Decoder(_Numbered)


class NoStep(ValueError):
    """The message is of an older schema that cannot be raised; why, in one line."""


def upcast(body: bytes, steps: Mapping[int, Step] | None = None, to: int = SCHEMA) -> bytes | None:
    """Return `body` raised to schema `to`; None where it is of no older schema. NoStep."""
    steps = STEPS if steps is None else steps
    try:
        schema = _numbered.decode(body).schema
    except msgspec.MsgspecError:
        return None
    if schema >= to:
        return None
    message: Message = msgspec.msgpack.decode(body)
    while schema < to:
        step = steps.get(schema)
        if step is None:
            raise NoStep(f"$.schema: {schema} is older than this version reads")
        try:
            message = step(message)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise NoStep(f"$.schema: cannot upgrade from {schema} to {schema + 1}: {error!r}") from None
        schema += 1
        message["schema"] = schema
    return msgspec.msgpack.encode(message)
