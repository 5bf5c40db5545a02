"""Faults that people order, to test a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from unicrond.events.vocabulary.base import Command, Request, Value
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.field_types import FaultKind, FaultPhase, Iteration, Name, Small, Text, WorkerOrNone
from unicrond.events.vocabulary.phrases import task_of


class Fault(Value, frozen=True, kw_only=True):
    """A fault that somebody ordered, for a worker or (`worker` "") for its node.

    `at_iteration` 0: at once, or at the next `phase` where one is given. `seconds`: of a slow iteration's delay, or
    until a dropped network is restored (0: never). `xid`: the code that the accelerator is to report. `spared`: what
    follows is held against neither node nor task (`unicronctl inject` without --counts).
    """

    kind: FaultKind
    worker: WorkerOrNone = always("")
    at_iteration: Iteration = always(0)
    phase: FaultPhase = always("")
    seconds: Annotated[float, Meta(ge=0.0, le=86400.0)] = always(0.0)
    xid: Small = always(0)
    excluded_from_blame: bool = False

    def on(self, node: str) -> str:
        """Say what is ordered, where and when."""
        where = f"{self.worker} on {node}" if self.worker else f"node {node}"
        code = f" {self.xid}" if self.kind == "xid" else ""
        when = f" in iteration {self.at_iteration}" if self.at_iteration else ""
        phase = f" at {self.phase}" if self.phase else ""
        lasting = f" ({self.seconds:g} s)" if self.seconds else ""
        return f"{self.kind}{code} of {where}{when}{phase}{lasting}"


class InjectionRequested(Request, frozen=True, kw_only=True):
    """A person orders a fault on `node`; only a coordinator that was started for that takes it."""

    node: Name
    fault: Fault

    def wish(self) -> str:
        """Say what the person asks for."""
        return f"fault ordered: {self.fault.on(self.node)}"

    def tasks_named(self) -> Iterator[str]:
        """Yield the tasks that it names."""
        if self.fault.worker:
            yield task_of(self.fault.worker)


class InjectFault(Command, frozen=True, kw_only=True):
    """The fault that `injection` asked for is to happen now. An agent that gets it late does not act."""

    injection: Text
    fault: Fault

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"inject {self.fault.on(self.node)}, ordered by {self.injection}"

    def tasks_named(self) -> Iterator[str]:
        """Yield the tasks that it names."""
        if self.fault.worker:
            yield task_of(self.fault.worker)
