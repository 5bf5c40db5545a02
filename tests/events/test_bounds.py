"""Every number in the log is bounded by its type, and what the cluster may grow to is let in."""

from __future__ import annotations

import inspect as python
import re
from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest
from msgspec import inspect

from tests.golden.regenerate import example
from unicrond.events import vocabulary as v
from unicrond.events.wire.codec import BadEvent, decode, encode
from unicrond.events.wire.envelope import Envelope

STRUCTS = [kind for _, kind in python.getmembers(v, python.isclass) if issubclass(kind, (v.Value, v.Event))]


def own_numbers(kind: type[msgspec.Struct]) -> Iterator[tuple[str, int | None, int | None]]:
    """Name, least and most of each integer field that the type declares itself."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        if field.name in kind.__annotations__:
            for low, high in _bounds(field.type):
                yield field.name, low, high


def _bounds(info: inspect.Type) -> Iterator[tuple[int | None, int | None]]:
    match info:
        case inspect.IntType():
            low = info.ge if info.ge is not None else info.gt + 1 if info.gt is not None else None
            yield low, info.le if info.le is not None else info.lt - 1 if info.lt is not None else None
        case inspect.UnionType():
            for kind in info.types:
                yield from _bounds(kind)
        case inspect.VarTupleType():
            yield from _bounds(info.item_type)
        case inspect.DictType():
            yield from _bounds(info.value_type)


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_vocabulary_bounds_every_number(kind: type[msgspec.Struct]) -> None:
    for name, low, high in own_numbers(kind):
        assert low is not None and high is not None, f"{kind.__name__}.{name}: has no bounds; give it a type with some"


@pytest.mark.parametrize("kind", [k for k in get_args(v.AnyObservation) if not k.is_request], ids=lambda k: k.__name__)
def test_vocabulary_bounds_every_array_of_an_agent(kind: type[msgspec.Struct]) -> None:
    """One legal message is never a cluster's worth of names: what a node can have, and no more."""
    for path in endless(inspect.type_info(kind), kind.__name__):
        pytest.fail(f"{path}: has no end; give it a max_length")


def endless(info: inspect.Type, path: str) -> Iterator[str]:
    """Where the type has arrays without a bound."""
    match info:
        case inspect.StructType():
            for field in info.fields:
                yield from endless(field.type, f"{path}.{field.name}")
        case inspect.UnionType():
            for kind in info.types:
                yield from endless(kind, path)
        case inspect.VarTupleType() | inspect.DictType() if info.max_length is None:
            yield path
        case inspect.VarTupleType():
            yield from endless(info.item_type, f"{path}[]")


def test_vocabulary_accepts_largest_cluster() -> None:
    """131,072 workers on 65,536 nodes, a thousand terms a day for a lifetime, boots by the wall clock."""
    spec = v.TaskSpec(name="big", max_workers=131_072, min_workers=131_072, tp=8, pp=64, global_batch=131_072)
    assert encode(Envelope(producer="api", boot=10**8, number=1, observed_at_us=0, event=v.TaskSubmitted(spec=spec)))
    joined = msgspec.structs.replace(example(v.NodeJoined).event, slots=1024, agent_boot=4_400_000_000_000_000)
    assert encode(msgspec.structs.replace(example(v.NodeJoined), event=joined, boot=4_400_000_000_000_000))
    replicas = tuple((f"n{number}", f"n{number}") for number in range(65_536 // 32))
    given = v.TaskAssignment(task="big", workers=131_072, replicas=replicas, waf=10**18)
    plan = msgspec.structs.replace(
        example(v.PlanAdopted).event, assignments=(given,), healthy={"big": 131_072}, epoch=10**8
    )
    assert encode(msgspec.structs.replace(example(v.PlanAdopted), event=plan))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (v.NodeJoined, "slots", 2**53 - 1),
        (v.NodeJoined, "slots", 1025),
        (v.NodeJoined, "agent_boot", 2**53 - 1),
        (v.ReshapeRequested, "tp", 2**53 - 1),
        (v.ReshapeRequested, "pp", 131_073),
        (v.ReshapeRequested, "max_workers", 2**53 - 1),
        (v.StepCommitted, "last", 2**53 - 1),
        (v.StepCommitted, "duration_us", 2**62 - 1),
        (v.WorkerJoinedGroup, "generation", 2**53 - 1),
        (v.WorkerExited, "exit_code", 2**63 - 1),
        (v.SnapshotStored, "shards", 2**53 - 1),
        (v.PlanAdopted, "epoch", 2**53 - 1),
    ],
)
def test_codec_refuses_event_out_of_bounds(kind: type[v.Event], field: str, value: int) -> None:
    envelope = example(kind)
    event = msgspec.structs.replace(envelope.event, **{field: value})
    body = msgspec.msgpack.encode(msgspec.structs.replace(envelope, event=event))
    with pytest.raises(BadEvent, match=re.escape(f"$.event.{field}")):
        decode(body)


@pytest.mark.parametrize(("field", "value"), [("boot", 2**53 - 1), ("term", 2**53 - 1)])
def test_codec_refuses_envelope_out_of_bounds(field: str, value: int) -> None:
    body = msgspec.msgpack.encode(msgspec.structs.replace(example(v.NodeIsolated), **{field: value}))
    with pytest.raises(BadEvent, match=re.escape(f"$.{field}")):
        decode(body)


def test_codec_refuses_task_out_of_bounds() -> None:
    spec = msgspec.structs.replace(example(v.TaskSubmitted).event.spec, max_workers=2**53 - 1)  # type: ignore[union-attr]
    envelope = msgspec.structs.replace(example(v.TaskSubmitted), event=v.TaskSubmitted(spec=spec))
    with pytest.raises(BadEvent, match=r"\$\.event\.spec\.max_workers"):
        decode(msgspec.msgpack.encode(envelope))


@pytest.mark.parametrize("name", ["api", "coordinator", "operator"])
def test_codec_refuses_reserved_node_name(name: str) -> None:
    joined = msgspec.structs.replace(example(v.NodeJoined).event, node=name)
    body = msgspec.msgpack.encode(msgspec.structs.replace(example(v.NodeJoined), producer=name, event=joined))
    with pytest.raises(BadEvent, match=f"'{name}' is not a node's name"):
        decode(body)


def test_codec_refuses_decision_of_other_producer() -> None:
    body = msgspec.msgpack.encode(msgspec.structs.replace(example(v.NodeIsolated), producer="n1"))
    with pytest.raises(BadEvent, match="only 'coordinator' decides, got 'n1'"):
        decode(body)
