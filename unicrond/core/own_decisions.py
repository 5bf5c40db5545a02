"""Checks of the coordinator's own decisions: tried before they are written, watched until they have worked.

Rules
-----
* A decision and the commands behind it are one batch, and commit together (`batches`).
* A batch is folded into a copy of the state before it is appended. One that the fold would not take (it breaks an
  invariant, its fold raises, it looks like a repetition) is a bug of ours, and never reaches the log.
* A batch that is read back has had an effect if one of its decisions, or a command of it, changed more than what is
  counted, and if the next batch does not ask for the same again. IDLE_MAX batches without effect, one after the
  other, and nothing more is appended: `decide` and the fold do not understand each other, and only fill the log.
* Each check says why (`DecidingStopped`); the coordinator decides nothing more, and training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from unicrond.core import fold as folding
from unicrond.core.rules.invariants import InvariantError, check
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.log.event_log import MAX_BATCH
from unicrond.events.wire.envelope import Envelope, RecordedEvent

#: So many batches without effect, one after the other, stop the appending.
IDLE_MAX = 20
_SUBSTANCE = (
    "nodes",
    "tasks",
    "incidents",
    "closed_incidents",
    "plan",
    "injections",
    "worker_mtbf_us",
    "term",
    "holds",
    "isolations_us",
    "silence",
    "alarms",
)


class DecidingStopped(Exception):
    """Nothing more may be decided; the message says why, in one line."""


def require_sound(state: ClusterState, envelopes: Sequence[Envelope]) -> None:
    """Raise DecidingStopped unless `state` takes all of these, and is sound then."""
    before = state
    for envelope in envelopes:
        after = folding.fold(state, RecordedEvent(state.seq + 1, state.now_us, envelope))
        description = f"{type(envelope.event).__name__} ({envelope.event.sentence()})"
        if after.quarantined_messages > state.quarantined_messages:
            raise DecidingStopped(f"a decision does not fit the state: {description}: {after.refusals[-1].reason}")
        if after.duplicates > state.duplicates or after.inert > state.inert:
            raise DecidingStopped(f"a decision looks like a repetition: {description}")
        state = after
    try:
        check(state, before)
    except InvariantError as error:
        raise DecidingStopped(f"decisions do not fit the state: {error}") from None


def batches(events: Sequence[v.AnyEvent]) -> Iterator[list[v.AnyEvent]]:
    """Yield the events in batches that can be written atomically, a decision together with the commands behind it.

    Parts of a membership have batches of their own, before that of the decision, which alone commits them: torn they
    are inert (events/vocabulary/placements.py). Every other command works by itself, however many there are. One
    decision is torn with effect: a membership that is sent by commands to more than MAX_BATCH nodes, none of which
    reads decisions. Should the coordinator die in between, the group cannot form: its members miss their deadline as if
    they hung, and those that replace them take the nearest state.
    """
    batch: list[v.AnyEvent] = []
    group: list[v.AnyEvent] = []
    was_part = False
    for event in events:
        is_part = isinstance(event, v.MembershipPart)
        if is_part is not was_part and batch + group:
            yield from _filled(batch, group)
            batch, group = [], []
        was_part = is_part
        if group and (not isinstance(event, v.Command) or len(group) == MAX_BATCH):
            if len(batch) + len(group) > MAX_BATCH:
                yield batch
                batch = []
            batch, group = batch + group, []
        group.append(event)
    yield from _filled(batch, group)


def _filled(batch: list[v.AnyEvent], group: list[v.AnyEvent]) -> Iterator[list[v.AnyEvent]]:
    """Yield the rest of both, each at most a batch."""
    if len(batch) + len(group) > MAX_BATCH:
        yield batch
        batch = []
    if batch or group:
        yield batch + group


class Breaker:
    """Counts batches without effect."""

    def __init__(self, idle_max: int = IDLE_MAX) -> None:
        self._idle_max = idle_max
        self._last: list[v.AnyEvent] = []
        self._had_effect = True
        self._idle = 0

    def folded(self, before: ClusterState, after: ClusterState, event: v.AnyEvent) -> None:
        """Note that an own event was read back."""
        # Of a command, the count of the node's commands is not an effect.
        parts = ("tasks", "injections") if isinstance(event, v.Command) else _SUBSTANCE
        if any(getattr(before, part) is not getattr(after, part) for part in parts):
            self._had_effect = True

    def about_to_append(self, events: Sequence[v.AnyEvent]) -> None:
        """Check, once the batch before has been read back, that these may be next. Raise DecidingStopped."""
        decisions = [_unnumbered(event) for event in events]
        # People may answer one alarm again and again; each time its end is news.
        repeats = decisions == self._last and not all(isinstance(event, v.AlarmEnded) for event in events)
        self._idle = self._idle + 1 if not self._had_effect or repeats else 0
        if self._idle >= self._idle_max:
            raise DecidingStopped(f"{self._idle} batches of decisions had no effect, the last: {events[0].sentence()}")
        self._last, self._had_effect = decisions, False


def _unnumbered(event: v.AnyEvent) -> v.AnyEvent:
    return replace(event, command_id="") if isinstance(event, v.Command) else event
