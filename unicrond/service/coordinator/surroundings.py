"""What a coordinator is handed: its settings, and what it has around it in its process (the views of the log, logins
with keys, the log's upkeep)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unicrond.core.state.alarms import Alarm
from unicrond.core.state.policy import Policy, Readmission
from unicrond.events.log.event_log import EventLog
from unicrond.events.vocabulary import AnyEvent, ErrorKind, SeverityLevel
from unicrond.events.wire.schemas import SCHEMA
from unicrond.views.accounts import Accounts
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
    """Feeds the views of a head: those of the table (views/table.py), the accounts, and `more`."""

    def __init__(self, *more: View, spans: Spans | None = None) -> None:
        self.goodput = GoodputKeeper()
        self.spans = Spans() if spans is None else spans
        shared_views: dict[str, JsonView] = {"goodput": self.goodput, "spans": self.spans}
        self.by_name = {name: shared_views.get(name) or make() for name, make in VIEWS.items()}
        self.accounts = Accounts()
        super().__init__(*self.by_name.values(), self.accounts, *more)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a coordinator has around it in its process. `requests`: the log under the login that may write what people
    ask for; None: the coordinator's own. `views`: are fed with each step. `live`: set while it decides, for parts that
    are made before it. `prepare`: called with the events that are about to be appended, which wait for it
    (consumers.py). `begin`: called when a term begins. `alarms`, `metrics`: of other parts of this process.
    `log_began_us`: when the log's first entry was recorded, 0: not known."""

    requests: EventLog | None = None
    views: HeadViews = field(default_factory=HeadViews)
    live: asyncio.Event = field(default_factory=asyncio.Event)
    prepare: Callable[[Sequence[AnyEvent]], Awaitable[None]] = _ignore_events
    begin: Callable[[], None] = _ignore_term
    alarms: Callable[[], list[Alarm]] = list
    metrics: Callable[[], Iterable[Metric]] = list
    log_began_us: Callable[[], int] = int


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """What the configuration and the command line say of a coordinator. `severity`: beside severity.py's table.
    `process`: HOST:PID, for the claim. `schema`: the newest that is written (events/wire/schemas.py). `skip`: entries
    of the log to pass over from now on (events/log/skips.py). `adopted_us`: when a person last accepted a log by name
    (known_event_log.py)."""

    policy: Policy
    heartbeat_s: float
    severity: Mapping[ErrorKind, SeverityLevel] = field(default_factory=dict)
    readmission: Readmission = field(default_factory=Readmission)
    schema: int = SCHEMA
    skip: Sequence[int] = ()
    process: str = ""
    adopted_us: int = 0
