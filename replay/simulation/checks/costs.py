"""The rule of costs: what an entry costs everybody who folds it is linear in the cluster, and in its own size.

Rules
-----
* Nothing is timed. What is counted is the same on each machine: lines of Python that run (a loop counts once per turn),
  the memory that is allocated at once (what is copied in C shows there), decisions that follow, and their bytes.
* The cluster is its nodes, tasks and workers before the entry. What the entry invents does not count for it: who
  invents a thousand workers may have a thousand looked at, and not a thousand stops written.
* A plan weighs each layout of each task on each type of GPU: these are its choices, and a look may cost more for each.
* Each fold is counted (`fold_exceeds`); of what strangers and liars say also what a head does then (`look_exceeds`);
  of the rest what the heads decide on one state (`decisions_exceed`).
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from unicrond.core import fold as folding
from unicrond.core.decide import decide, needed_solves
from unicrond.core.nodes.gpu_types import node_types
from unicrond.core.own_decisions import require_sound
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.wire.codec import COORDINATOR, encode
from unicrond.events.wire.envelope import Envelope, RecordedEvent

T = TypeVar("T")


class EntryCost(NamedTuple):
    """Say how many lines of Python ran, and how many bytes were allocated at once, at most."""

    lines: int
    memory_bytes: int


class ClusterSize(NamedTuple):
    """Say how many nodes, tasks and workers a cluster has, and between how many choices its plans decide."""

    units: int
    choices: int


class LinearBound(NamedTuple):
    """Bound what an entry costs: any entry, for each node, task and worker, for each byte of the entry, and for each
    choice of a plan."""

    base: int
    unit: int
    byte: int = 0
    choice: int = 0

    def most(self, size: ClusterSize, size_bytes: int = 0) -> int:
        """Return the bound in a cluster of that size."""
        return self.base + self.unit * size.units + self.byte * size_bytes + self.choice * size.choices


#: What one entry may cost. Folding: of any entry, decisions too.
FOLD_LINES, FOLD_BYTES = LinearBound(8_000, 2, 4), LinearBound(100_000, 20, 40)
#: Looking, which solves problems and places workers.
LOOK_LINES, LOOK_BYTES = LinearBound(12_000, 60, 4, 1_000), LinearBound(200_000, 200, 40)
#: What may be decided on one state.
DECISIONS, DECISION_BYTES = LinearBound(32, 3), LinearBound(65_536, 4_096)


def size_of(state: ClusterState) -> ClusterSize:
    """Count what the cluster has, and what its plans choose between."""
    units = len(state.nodes) + sum(1 + len(task.workers) for task in state.tasks.values())
    _, types = node_types(state.nodes.values())
    return ClusterSize(
        units, max(1, len({*types.values()})) * sum(1 + len(task.spec.layouts) for task in state.tasks.values())
    )


def measure(run: Callable[[], T]) -> tuple[T, EntryCost]:
    """Run it; return what it returns, and what it cost. A debugger's or a coverage's trace rests meanwhile."""
    lines = 0

    def trace(_frame: FrameType, kind: str, _argument: Any) -> Callable[..., Any]:
        """Count a line."""
        nonlocal lines
        lines += kind == "line"
        return trace

    is_nested, before = tracemalloc.is_tracing(), sys.gettrace()
    if not is_nested:
        tracemalloc.start(1)
    tracemalloc.reset_peak()
    start_bytes, _ = tracemalloc.get_traced_memory()
    sys.settrace(trace)
    try:
        result = run()
    finally:
        sys.settrace(before)
        _, peak_bytes = tracemalloc.get_traced_memory()
        if not is_nested:
            tracemalloc.stop()
    return result, EntryCost(lines, max(0, peak_bytes - start_bytes))


def fold_exceeds(before: ClusterState, entry: RecordedEvent) -> tuple[ClusterState, str]:
    """Fold the entry; return the state, and in which way that cost too much, "" where it did not."""
    after, cost = measure(lambda: folding.fold(before, entry))
    label, size_bytes = f"to fold {type(entry.envelope.event).__name__}", len(encode(entry.envelope))
    limits, cluster = (FOLD_LINES, FOLD_BYTES), size_of(before)
    if _excess(label, cost, limits, cluster, size_bytes):
        # What grows once for the whole process, as a cache does, is no cost of the entry.
        _, second_cost = measure(lambda: folding.fold(replace(before), entry))
        cost = EntryCost(cost.lines, min(cost.memory_bytes, second_cost.memory_bytes))
    return after, _excess(label, cost, limits, cluster, size_bytes)


def look_exceeds(before: ClusterState, entry: RecordedEvent, after: ClusterState, policy: Policy) -> str:
    """Look at the state as a head does once it has folded the entry: survey, deadlines, decide, try what is decided.
    Return in which way that costs too much; "" where it does not."""
    size_bytes, cluster = len(encode(entry.envelope)), size_of(before)

    def look() -> Sequence[v.AnyEvent]:
        """Return what would be decided."""
        survey = Survey(after, policy)
        deadlines(survey)
        needed_solves(survey)
        return decide(survey, {})

    decisions, cost = measure(look)
    where = f"to decide on {type(entry.envelope.event).__name__}"
    if story := _excess(where, cost, (LOOK_LINES, LOOK_BYTES), cluster, size_bytes):
        return story
    envelopes = envelopes_of(after, decisions)
    if story := decisions_exceed(before, envelopes):
        return story
    _, cost = measure(lambda: require_sound(after, envelopes))
    if story := _excess(f"to try what follows from {where[13:]}", cost, (LOOK_LINES, LOOK_BYTES), cluster, size_bytes):
        return story
    for envelope in envelopes:
        after, story = fold_exceeds(after, RecordedEvent(after.seq + 1, after.now_us, envelope))
        if story:
            return story
    return ""


def decisions_exceed(basis: ClusterState, envelopes: Sequence[Envelope]) -> str:
    """Return in which way what is decided on one state is too much; "" where it is not. `basis`: the cluster."""
    size_bytes, cluster = sum(len(encode(envelope)) for envelope in envelopes), size_of(basis)
    for count, bound, words in (
        (len(envelopes), DECISIONS, "decisions"),
        (size_bytes, DECISION_BYTES, "bytes of decisions"),
    ):
        if count > (most := bound.most(cluster)):
            return f"{count} {words} on one state of a cluster of {cluster.units} (at most {most})"
    return ""


def envelopes_of(state: ClusterState, events: Sequence[v.AnyEvent]) -> list[Envelope]:
    """Return the decisions as the head of the present term would write them next."""
    number = state.last_numbers.get(COORDINATOR, (0, 0))[1]
    return [
        Envelope(
            producer=COORDINATOR, boot=state.term, number=number + n, term=state.term, observed_at_us=1, event=event
        )
        for n, event in enumerate(events, start=1)
    ]


def _excess(
    label: str, cost: EntryCost, limits: tuple[LinearBound, LinearBound], cluster: ClusterSize, size_bytes: int
) -> str:
    for value, limit, unit in zip(cost, limits, ("lines", "bytes of memory"), strict=True):
        most = limit.most(cluster, size_bytes)
        if value > most:
            return f"{label} ({size_bytes} bytes) takes {value} {unit} in a cluster of {cluster.units} (at most {most})"
    return ""
