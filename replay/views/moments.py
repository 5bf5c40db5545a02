"""Any moment of a log, quickly: states are stored every EVERY entries, and folded on from there. Pure.

States share what they have in common, so that storing many costs little.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from typing import NamedTuple

from unicrond.core.replayer import LogStep, policy_after, steps
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState
from unicrond.events.wire.envelope import Entry
from unicrond.views.goodput import GoodputTotals, account_step
from unicrond.views.view import View

#: Entries between two stored states.
EVERY = 250


class Moment(NamedTuple):
    """The state after an entry. `policy`: that of the coordinator of that term."""

    state: ClusterState
    totals: GoodputTotals
    policy: Policy


_FIRST = Moment(ClusterState(), GoodputTotals(), Policy())


class Moments(View):
    """Finds any moment of a log; it takes every step in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._times_us: list[int] = []
        self._checkpoints: list[Moment] = [_FIRST]
        self._last = _FIRST
        self._cursor = (0, _FIRST)

    def feed(self, step: LogStep) -> None:
        """Add the next step."""
        self._last = _moment(self._last, step)
        self.entries.append(step.entry)
        self._times_us.append(self._last.state.now_us)
        if len(self.entries) % EVERY == 0:
            self._checkpoints.append(self._last)
        self._cursor = (len(self.entries), self._last)

    @property
    def span_us(self) -> tuple[int, int]:
        """Return the times of the first and the last entry; zeros for an empty log."""
        return (self._times_us[0], self._times_us[-1]) if self._times_us else (0, 0)

    def at_us(self, time_us: int | None) -> Moment:
        """Return the newest moment that is not after this time; None: the last."""
        return self._last if time_us is None else self.after(bisect_right(self._times_us, time_us))

    def after(self, count: int) -> Moment:
        """Return the moment after so many entries."""
        start, moment = self._cursor
        if not start <= count <= start + EVERY:
            start, moment = count - count % EVERY, self._checkpoints[count // EVERY]
        for step in steps(self.entries[start:count], moment.state):
            moment = _moment(moment, step)
        self._cursor = (count, moment)
        return moment


def _moment(before: Moment, step: LogStep) -> Moment:
    """Return the moment after the step, which follows the moment before it."""
    policy = before.policy
    with suppress(ValueError):  # another version's policy; the one before is the nearest
        policy = policy_after(policy, step.entry)
    return Moment(step.after, account_step(before.totals, step), policy)
