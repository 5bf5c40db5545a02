"""Valid events at the edges of their types: every type, every field, from every producer, in any order.

They are derived from the vocabulary's own types and bounds, so that new events and fields are covered without a change
here. Names are few, and most of them known to the cluster, so that events concern something; numbers are at their
bounds, or beside common values. They are drawn from a `random.Random`, so that hypothesis, the fuzzer and a live test
can all use them."""

from __future__ import annotations

import functools
import math
import random
import typing
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect

from unicrond.events.vocabulary import (
    NAME_PATTERN,
    AnyObservation,
    CoordinatorStarted,
    Heartbeat,
    Request,
    WorkerExited,
)
from unicrond.events.wire.codec import API_PRODUCER, BadEvent, decode, encode
from unicrond.events.wire.envelope import Envelope

#: What may come from anybody but the coordinator. Heartbeats stand on another stream.
KINDS: tuple[type[Any], ...] = tuple(kind for kind in typing.get_args(AnyObservation) if kind is not Heartbeat)


#: A node without a host: events in its name come from no agent.
STRANGER = "stranger"


#: A boot that no agent has.
NO_BOOT = 2**52 - 1


def is_forged(envelope: Envelope) -> bool:
    """Return whether the envelope was drawn here, and not sent by a part of the cluster."""
    return STRANGER in (envelope.producer, getattr(envelope.event, "version", "")) or envelope.boot == NO_BOOT


#: Fields of the items of long arrays that get a name each.
_INVENTED = ("worker", "peer", "node", "users", "nodes", "lost_peers")
#: Lengths of arrays, and of those in the largest events, which are cut to what is valid.
SHORT, LONG = (0, 1, 2, 5), (256, 1024, 4096, 131_072)


class Edges:
    """A source of edge events. `nodes`, `tasks`, `workers`: names that exist; unknown ones are mixed in. `lengths`: of
    arrays; where they are long their names are invented, each another."""

    def __init__(
        self,
        rng: random.Random,
        nodes: Sequence[str],
        tasks: Sequence[str],
        workers: Sequence[str] = (),
        lengths: Sequence[int] = SHORT,
    ) -> None:
        self.rng = rng
        self.lengths = lengths
        self._invents = False
        self.nodes = [*nodes, "nobody", "x" * 63]
        self.tasks = [*tasks, "nothing", "y" * 63]
        self.workers = [*workers, *(f"{task}.{number}" for task in tasks for number in (1, 2, 3, 999_999_999))]

    def envelope(self, kind: type[Any] | None = None, *, boot: int = 1, number: int = 1) -> Envelope | None:
        """Return a valid envelope of that kind, or of any; None where the drawn fields contradict each other."""
        event = self._value(_info(typing.cast(Any, kind or self.rng.choice(KINDS))), "")
        if isinstance(event, WorkerExited):
            how = self.rng.choice(({"exit_code": None, "signal": 9}, {"exit_code": 2**31 - 1, "signal": None}))
            event = msgspec.structs.replace(event, **how)
        producer = API_PRODUCER if isinstance(event, Request) else event.node
        envelope = Envelope(
            producer=producer,
            boot=boot,
            number=number,
            observed_at_us=self.rng.choice((0, 1, 2**62 - 1)),
            event=event,
        )
        try:
            return decode(encode(envelope))
        except BadEvent:
            return None

    def claim(self, term: int, boot: int) -> Envelope:
        """Return a claim of a term by a stranger."""
        event = CoordinatorStarted(term=term, version=STRANGER)
        return Envelope(producer="coordinator", boot=boot, number=1, term=term, observed_at_us=0, event=event)

    def _value(self, info: inspect.Type, name: str) -> Any:
        match info:
            case inspect.StructType():
                return info.cls(**{field.name: self._value(field.type, field.name) for field in info.fields})
            case inspect.BoolType():
                return self.rng.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.IntType():
                low = info.ge if info.ge is not None else info.gt + 1 if info.gt is not None else -(2**63)
                high = info.le if info.le is not None else info.lt - 1 if info.lt is not None else 2**63 - 1
                usual = [n for n in (0, 1, 2, 3) if low <= n <= high]
                return self.rng.choice([low, low + 1, high - 1, high, *usual, *usual])
            case inspect.FloatType():
                edges = [info.ge, info.le, 0.5, 1.0, 5e-324, 1.7e308, -1.7e308, math.nan, math.inf, -math.inf]
                fits = [n for n in edges if n is not None and (_fits(n, info) or _unbounded(info))]
                return self.rng.choice(fits)
            case inspect.StrType():
                return self._text(info, name)
            case inspect.LiteralType():
                return self.rng.choice(info.values)
            case inspect.VarTupleType():
                if self.lengths is SHORT or self._invents:
                    return tuple(self._value(info.item_type, name) for _ in range(self.rng.choice(SHORT)))
                self._invents = True
                count = min(self.rng.choice(self.lengths), info.max_length or SHORT[-1])
                items = tuple(self._value(info.item_type, name) for _ in range(count))
                self._invents = False
                return items
            case inspect.DictType():
                count = self.rng.choice((0, 0, 1, 2))
                return {self._value(info.key_type, ""): self._value(info.value_type, name) for _ in range(count)}
            case inspect.UnionType():
                return self._value(self.rng.choice(info.types), name)
            case _:
                raise NotImplementedError(
                    f"no edges of {info}: teach replay/simulation/faults/boundary_events.py this type"
                )

    def _text(self, info: inspect.StrType, name: str) -> str:
        if self._invents and name in _INVENTED:
            prefix = f"{self.rng.choice(self.tasks)}." if name in ("worker", "lost_peers") else "x"
            return f"{prefix}{self.rng.randrange(10**9)}"
        if info.pattern == NAME_PATTERN:
            return self.rng.choice(self.tasks if name in ("task", "name") else self.nodes)
        if info.pattern is not None:
            return self.rng.choice([*self.workers, ""] if ")?" in info.pattern else self.workers)
        if name == "entry":
            return self.rng.choice(("gpt", "", "/x", "x"))
        longest = info.max_length or 10
        return self.rng.choice(("", "a", "1", "\x1b[31m\n\0", "\u2028²" * (longest // 2), "z" * longest))


@functools.cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _unbounded(info: inspect.FloatType) -> bool:
    return info.ge is None and info.gt is None and info.le is None and info.lt is None


def _fits(number: float, info: inspect.FloatType) -> bool:
    return (
        (info.ge is None or number >= info.ge)
        and (info.gt is None or number > info.gt)
        and (info.le is None or number <= info.le)
        and (info.lt is None or number < info.lt)
        and math.isfinite(number)
    )
