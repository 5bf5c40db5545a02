"""The replay itself: the coordinator's fold, entry after entry, from the first one. Nothing else moves the state."""

from __future__ import annotations

from collections.abc import Iterable

from unicrond.core.fold import fold
from unicrond.core.state.policy import Policy, settings_of
from unicrond.core.state.state import ClusterState
from unicrond.events.log.event_log import LogDamaged
from unicrond.events.log.point import Point
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.envelope import Entry, RecordedEvent

EMPTY = ClusterState()


def replay(entries: Iterable[Entry], until: Point | None = None, *, start: ClusterState = EMPTY) -> ClusterState:
    """Return the state after the entries that `until` covers (None: all), beginning from `start`.

    Raise LogDamaged where an entry is missing: a state that skipped one would look true and be wrong.
    """
    state = start
    for entry in entries:
        if until is not None and not until.covers(entry):
            break
        if entry.seq != state.seq + 1:
            raise LogDamaged(f"entry {entry.seq} follows entry {state.seq}; a replay needs every entry from 1 on")
        state = fold(state, entry)
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
