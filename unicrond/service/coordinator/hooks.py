"""What a coordinator has around it in its process: the views of the log, logins with keys, the log's upkeep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unicrond.events.log.event_log import EventLog
from unicrond.events.vocabulary import AnyEvent
from unicrond.views.goodput_keeper import GoodputKeeper
from unicrond.views.spans import Spans
from unicrond.views.table import VIEWS
from unicrond.views.view import JsonView, View, Views

if TYPE_CHECKING:
    from prometheus_client.core import Metric  # which a simulated coordinator does without


async def _ignore_events(_: Sequence[AnyEvent]) -> None:
    pass


def _ignore_term() -> None:
    pass


class HeadViews(Views):
    """Feeds the views of a head: those of the table (views/table.py), and `more`."""

    def __init__(self, *more: View, spans: Spans | None = None) -> None:
        self.goodput = GoodputKeeper()
        self.spans = Spans() if spans is None else spans
        own: dict[str, JsonView] = {"goodput": self.goodput, "spans": self.spans}
        self.by_name = {name: own.get(name) or make() for name, make in VIEWS.items()}
        super().__init__(*self.by_name.values(), *more)


@dataclass
class Surroundings:
    """The hooks of a coordinator's process. `requests`: the log under the login that may write what people ask for.
    `prepare`: called with the events that are about to be appended, which wait for it (consumers.py). `begin`: called
    when a term begins. `alarms`, `metrics`: of other parts of this process."""

    requests: EventLog
    prepare: Callable[[Sequence[AnyEvent]], Awaitable[None]] = _ignore_events
    begin: Callable[[], None] = _ignore_term
    alarms: Callable[[], list[str]] = list
    metrics: Callable[[], Iterable[Metric]] = list

    def add_alarms(self, more: Callable[[], list[str]]) -> None:
        """Add the alarms of one more part of this process."""
        before = self.alarms
        self.alarms = lambda: [*before(), *more()]
