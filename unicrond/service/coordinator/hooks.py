"""The hooks of a coordinator for the rest of its process: logins with keys, the log's upkeep, notifications."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unicrond.core.state.state import ClusterState
from unicrond.events.log.event_log import EventLog
from unicrond.events.vocabulary import AnyEvent
from unicrond.events.wire.envelope import Entry

if TYPE_CHECKING:
    from prometheus_client.core import Metric  # which a simulated coordinator does without


async def _ignore_events(_: Sequence[AnyEvent]) -> None:
    pass


def _ignore_term() -> None:
    pass


def _ignore_entry(_before: ClusterState, _after: ClusterState, _entry: Entry) -> None:
    pass


@dataclass
class Surroundings:
    """The hooks of a coordinator's process. `requests`: the log under the login that may write what people ask for.
    `prepare`: called with the events that are about to be appended, which wait for it (consumers.py). `begin`: called
    when a term begins. `alarms`, `metrics`: of other parts of this process. `folded`: called with each new entry while
    it leads; must not raise (notifier.py)."""

    requests: EventLog
    prepare: Callable[[Sequence[AnyEvent]], Awaitable[None]] = _ignore_events
    begin: Callable[[], None] = _ignore_term
    alarms: Callable[[], list[str]] = list
    metrics: Callable[[], Iterable[Metric]] = list
    folded: Callable[[ClusterState, ClusterState, Entry], None] = _ignore_entry

    def add_alarms(self, more: Callable[[], list[str]]) -> None:
        """Add the alarms of one more part of this process."""
        before = self.alarms
        self.alarms = lambda: [*before(), *more()]
