"""Views of the log: each takes the log's steps in order and shows something of them. Nothing is decided from a view.

Rules
-----
* A `LogStep` is one entry with the states before and after it. The log is folded once, by whoever reads it: a head
  (service/coordinator/follower.py), a replay, a test. Views fold nothing.
* `Views` feeds several. A view that raises is a bug of ours: it is closed, which is logged and is an alarm until the
  reading begins again, and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from unicrond.core.fold import fold
from unicrond.core.state.state import ClusterState
from unicrond.events.vocabulary import AnyEvent
from unicrond.events.wire.envelope import Entry, RecordedEvent

log = logging.getLogger("unicrond")

_EMPTY = ClusterState()


class LogStep(NamedTuple):
    """Holds one entry of the log, and the states before and after it."""

    before: ClusterState
    entry: Entry
    after: ClusterState

    @property
    def event(self) -> AnyEvent | None:
        """Return the entry's event; None for an entry that is quarantined."""
        return self.entry.envelope.event if isinstance(self.entry, RecordedEvent) else None


class View(Protocol):
    """Shows something of a log. A view inherits from this class, so that it need not define `begin`."""

    def begin(self) -> None:
        """Forget everything: the reading begins anew. Does nothing where a view is fed only once."""
        return

    def feed(self, step: LogStep) -> None:
        """Take the next step. May raise what it likes."""
        ...


class Views:
    """Feeds every step to several views, in the order in which they were added."""

    def __init__(self, *views: View) -> None:
        self._views: list[View] = []
        self._open: tuple[View, ...] = ()
        self._alarms: list[str] = []
        for view in views:
            self.add(view)

    def add(self, view: View) -> None:
        """Add a view, which takes the steps from the next one on."""
        self._views.append(view)
        self._open += (view,)

    def begin(self) -> None:
        """Start again at the log's beginning, where nothing is known; closed views are open again."""
        self._alarms.clear()
        self._open = tuple(self._views)
        for view in self._views:
            view.begin()

    def feed(self, step: LogStep) -> None:
        """Feed the next step to all views that are open. Never raises."""
        for view in self._open:
            try:
                view.feed(step)
            except Exception:  # a bug of ours must not stop what heals
                self._close(view, step)

    def alarms(self) -> list[str]:
        """Return the views that are closed, a line each."""
        return list(self._alarms)

    def _close(self, view: View, step: LogStep) -> None:
        event = step.event
        name, kind = type(view).__name__, "quarantined" if event is None else type(event).__name__
        self._open = tuple(other for other in self._open if other is not view)
        message = f"the view {name} ends at entry {step.entry.seq} ({kind})"
        self._alarms.append(f"{message}; nothing else is concerned")
        log.exception("%s; restart the coordinator without its snapshot", message)


def steps(entries: Iterable[Entry], state: ClusterState = _EMPTY) -> Iterator[LogStep]:
    """Fold the entries, which come after `state`, and yield a step for each."""
    for entry in entries:
        before, state = state, fold(state, entry)
        yield LogStep(before, entry, state)
