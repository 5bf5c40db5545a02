"""Views of the log: each takes the log's steps in order and shows something of them. Nothing is decided from a view.

A *view* is what the state does not know: sums, spans, stories, the state of another moment. It takes a `LogStep` for
each entry, in order, and has a value. A *projection* is a pure function of one state, made when somebody asks: the
metrics (service/api/metrics.py), the page (page/view.py), the one-step table, what-if questions, spares, all tables of
`display`. These stay functions: they would remember nothing from one step to the next, so that as views they would work
for every entry in order to be looked at once in a while, and would have to be carried in snapshots to survive a
restart. What of a metric or of the page needs the past (goodput, durations of phases) they take from a view.

Rules
-----
* The log is folded once, by whoever reads it: `steps` of core/replayer.py, or a head
  (service/coordinator/follower.py). Views fold nothing.
* `feed_all` feeds one view or several, and lets errors out: replays and tests.
* `Views` feeds several in a head. A view that raises is a bug of ours: it is closed, which is logged and is an alarm
  until the reading begins again, and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

from unicrond.core.replayer import EMPTY, LogStep, policy_after, steps
from unicrond.core.state.alarms import Alarm
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState
from unicrond.events.wire.envelope import Entry

log = logging.getLogger("unicrond")


class View(Protocol):
    """Shows something of a log. A view inherits from this class, so that it need not define `begin`."""

    def begin(self) -> None:
        """Forget everything: the reading begins anew. Does nothing where a view is fed only once."""
        return

    def feed(self, step: LogStep) -> None:
        """Take the next step. May raise what it likes."""
        ...


class JsonView(View, Protocol):
    """A view whose value can be asked for by name, once it stands in the table (table.py)."""

    def value(self, state: ClusterState) -> Any:
        """Return what the view has to say, as plain JSON types. `state`: that after the last step."""
        ...


class Views:
    """Feeds every step to several views, in the order in which they were added."""

    def __init__(self, *views: View) -> None:
        self._views: list[View] = []
        self._open: tuple[View, ...] = ()
        self._alarms: list[Alarm] = []
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

    def alarms(self) -> list[Alarm]:
        """Return the views that are closed, an alarm each."""
        return list(self._alarms)

    def _close(self, view: View, step: LogStep) -> None:
        event = step.event
        name, kind = type(view).__name__, "quarantined" if event is None else type(event).__name__
        self._open = tuple(candidate for candidate in self._open if candidate is not view)
        message = f"the view {name} ends at entry {step.entry.seq} ({kind})"
        self._alarms.append(Alarm("view-closed", f"{message}; nothing else is concerned", name.strip("_")))
        log.exception("%s; restart the coordinator without its snapshot", message)


def feed_all(view: View, entries: Iterable[Entry], state: ClusterState = EMPTY) -> ClusterState:
    """Fold the entries, which come after `state`, and feed each step to the view; return the last state. Raise
    LogDamaged, and what the view raises."""
    for step in steps(entries, state):
        view.feed(step)
        state = step.after
    return state


class PolicyView(View):
    """Follows the coordinator's policy; `policy` is that of the last step's term."""

    def __init__(self) -> None:
        self.policy = Policy()

    def feed(self, step: LogStep) -> None:
        """Take over the policy that begins with the step. Raise ValueError for that of a version that has other
        settings."""
        self.policy = policy_after(self.policy, step.entry)
