"""Hypothesis strategies for every event, read off the vocabulary's own types and bounds.

`events()` gives any event, `envelopes()` any *valid* envelope (who may say what under which term), `of(T)`
any value of a struct type. `EVENT_TYPES` lists the vocabulary.
"""

from __future__ import annotations

import functools
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from unicrond.events.vocabulary import (
    SERIAL_MAX,
    AnyEvent,
    Command,
    CoordinatorStarted,
    Decision,
    Event,
    Heartbeat,
    Request,
    StacksTaken,
    WorkerExited,
)
from unicrond.events.wire.codec import API_PRODUCER, COORDINATOR, RESERVED_NAMES
from unicrond.events.wire.envelope import Envelope

EVENT_TYPES: tuple[type[Event], ...] = typing.get_args(AnyEvent)
names = st.from_regex(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z").filter(lambda name: name not in RESERVED_NAMES)


@functools.cache
def of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Values of a struct type, each field within its bounds."""
    return _from_type(inspect.type_info(kind))


@st.composite
def events(draw: st.DrawFn, kinds: tuple[type[Event], ...] = EVENT_TYPES) -> Event:
    """Any event of the given kinds, valid by itself."""
    event = draw(of(draw(st.sampled_from(kinds))))
    if isinstance(event, WorkerExited):
        how = draw(st.sampled_from([{"exit_code": 0, "signal": None}, {"exit_code": None, "signal": 9}]))
        return msgspec.structs.replace(event, **how)
    if isinstance(event, StacksTaken):
        places = range(len(event.stacks) + 1)
        workers = tuple(
            msgspec.structs.replace(worker, worker=f"{event.task}.{number}", stack=draw(st.sampled_from(places)))
            for number, worker in enumerate(event.workers)
        )
        return msgspec.structs.replace(event, workers=workers)
    return event


@st.composite
def envelopes(
    draw: st.DrawFn, kinds: tuple[type[Event], ...] = tuple(k for k in EVENT_TYPES if k is not Heartbeat)
) -> Envelope:
    """Any envelope that `check` accepts. Heartbeats only if asked for: they have a stream of their own."""
    event = draw(events(kinds))
    producer, term = draw(names), 0
    if isinstance(event, Decision | Command):
        term = event.term if isinstance(event, CoordinatorStarted) else draw(st.integers(1, SERIAL_MAX))
        producer = COORDINATOR
        if isinstance(event, Command):
            number = draw(st.integers(0, 10**9))
            event = msgspec.structs.replace(event, command_id=f"{term}.{event.epoch}.{event.node}.{number}")
    elif isinstance(event, Request):
        producer = API_PRODUCER
    else:
        event = msgspec.structs.replace(event, node=producer)
    return Envelope(producer=producer, term=term, event=typing.cast(AnyEvent, event), **draw(_rest()))


@functools.cache
def _rest() -> st.SearchStrategy[dict[str, Any]]:
    """The fields of an envelope that may be anything."""
    info = typing.cast(inspect.StructType, inspect.type_info(Envelope))
    bound = ("schema", "producer", "term", "event")
    return st.fixed_dictionaries({f.name: _from_type(f.type) for f in info.fields if f.name not in bound})


def _fields(info: inspect.StructType) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({field.name: _from_type(field.type) for field in info.fields})


def _from_type(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.StructType():
            return _fields(info).map(lambda fields: info.cls(**fields))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.IntType():
            low = info.ge if info.ge is not None else (info.gt + 1 if info.gt is not None else -(2**31))
            high = info.le if info.le is not None else (info.lt - 1 if info.lt is not None else 2**31)
            return st.integers(low, high)
        case inspect.FloatType():
            bounded = any(bound is not None for bound in (info.ge, info.gt, info.le, info.lt))
            if not bounded:
                return st.floats()  # a loss: NaN and infinities are news, not errors
            low = info.ge if info.ge is not None else info.gt
            high = info.le if info.le is not None else info.lt
            return st.floats(
                low, high, exclude_min=info.gt is not None, exclude_max=info.lt is not None, allow_infinity=False
            )
        case inspect.StrType():
            if info.pattern == r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z":
                return names
            if info.pattern is not None:
                return st.from_regex(info.pattern)
            return st.text(max_size=min(info.max_length or 12, 12))
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.VarTupleType():
            return st.lists(_from_type(info.item_type), max_size=3).map(tuple)
        case inspect.DictType():
            return st.dictionaries(_from_type(info.key_type), _from_type(info.value_type), max_size=2)
        case inspect.UnionType():
            return st.one_of(*(_from_type(kind) for kind in info.types))
        case _:
            raise NotImplementedError(f"no strategy for {info}: teach tests/strategies.py this type")
