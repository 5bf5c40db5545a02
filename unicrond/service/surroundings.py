"""What a coordinator has around it in its process: logins with keys and TLS, the log's life, who is told of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from events.envelope import Entry
from events.log import EventLog
from events.vocabulary import AnyEvent
from unicrond.core.state import ClusterState

if TYPE_CHECKING:
    from prometheus_client.core import Metric  # which a simulated coordinator does without


async def _nothing(_: Sequence[AnyEvent]) -> None:
    pass


def _begun() -> None:
    pass


def _unseen(_before: ClusterState, _after: ClusterState, _entry: Entry) -> None:
    pass


@dataclass
class Surroundings:
    """`requests`: the log under the login that may write what people ask for. `prepare`: told of what is about to be
    appended, which waits for it (consumers.py). `begin`: told that a term begins. `alarms`, `metrics`: of others in
    this process. `folded`: told of each new entry while it leads; must not raise (notifier.py)."""

    requests: EventLog
    prepare: Callable[[Sequence[AnyEvent]], Awaitable[None]] = _nothing
    begin: Callable[[], None] = _begun
    alarms: Callable[[], list[str]] = list
    metrics: Callable[[], Iterable[Metric]] = list
    folded: Callable[[ClusterState, ClusterState, Entry], None] = _unseen

    def add_alarms(self, more: Callable[[], list[str]]) -> None:
        """Those of one more part of this process."""
        before = self.alarms
        self.alarms = lambda: [*before(), *more()]
