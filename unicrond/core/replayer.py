"""The replay itself: the coordinator's fold, entry after entry, from the first one. Nothing else moves the state.

`steps` is the one loop over a log: the state alone (`replay`) and every view of the log (unicrond/views/view.py) are
made of what it yields. A head folds entry by entry, as they come (service/coordinator/follower.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

from unicrond.core.fold import fold
from unicrond.core.state.policy import Policy, settings_of
from unicrond.core.state.state import ClusterState
from unicrond.events.log.event_log import LogDamaged
from unicrond.events.log.point import Point
from unicrond.events.vocabulary import AnyEvent, CoordinatorStarted
from unicrond.events.wire.envelope import Entry, RecordedEvent

EMPTY = ClusterState()


class LogStep(NamedTuple):
    """Holds one entry of the log, and the states before and after it."""

    before: ClusterState
    entry: Entry
    after: ClusterState

    @property
    def event(self) -> AnyEvent | None:
        """Return the entry's event; None for an entry that is quarantined."""
        return self.entry.envelope.event if isinstance(self.entry, RecordedEvent) else None


def steps(entries: Iterable[Entry], state: ClusterState = EMPTY) -> Iterator[LogStep]:
    """Fold the entries, which come after `state`, and yield a step for each.

    Raise LogDamaged where an entry is missing: a state that skipped one would look true and be wrong.
    """
    for entry in entries:
        if entry.seq != state.seq + 1:
            raise LogDamaged(f"entry {entry.seq} follows entry {state.seq}; a replay needs every entry from 1 on")
        before, state = state, fold(state, entry)
        yield LogStep(before, entry, state)


def replay(entries: Iterable[Entry], until: Point | None = None, *, start: ClusterState = EMPTY) -> ClusterState:
    """Return the state after the entries that `until` covers (None: all), beginning from `start`. Raise LogDamaged."""
    state = start
    for step in steps(entries if until is None else takewhile(until.covers, entries), start):
        state = step.after
    return state


def policy_after(policy: Policy, entry: Entry) -> Policy:
    """Return the policy of the coordinator whose term the entry begins; after any other entry `policy` as before.

    Raise ValueError for the policy of a version that has other settings.
    """
    if not isinstance(entry, RecordedEvent) or not isinstance(entry.envelope.event, CoordinatorStarted):
        return policy
    event = entry.envelope.event
    try:
        return settings_of(event.policy).policy
    except ValueError as error:
        raise ValueError(f"the policy of term {event.term} is another version's: {error}") from None
