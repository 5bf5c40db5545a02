"""Exports events to the outside: notices (notifier.py), traces (tracing.py).

Where the configuration names no destination, nothing is made and nothing starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from unicrond.core.state.alarms import Alarm
from unicrond.core.state.state import ClusterState
from unicrond.events.host import optional_dependencies as extras
from unicrond.intake.config import Config
from unicrond.service.api.redaction import mask_of
from unicrond.service.coordinator.surroundings import HeadViews
from unicrond.service.export.notifier import Notifier
from unicrond.service.head.side_jobs import Job
from unicrond.views.spans import Span, Spans

if TYPE_CHECKING:
    from unicrond.service.export.tracing import Tracing  # needs an extra


class Exporters:
    """Exports what the configuration asks for, while this head leads. `views`: for the coordinator, which feeds them.
    Raises MissingExtra."""

    def __init__(self, config: Config, leads: Callable[[], bool]) -> None:
        self._leads = leads
        self._notifier: Notifier | None = None
        if config.notify.to or config.notify.heartbeat_url:
            self._notifier = Notifier(config.notify, leads, hide=_without_secrets)
        self._tracing = _tracing(config.traces_url) if config.traces_url else None
        notifiers = [self._notifier] if self._notifier is not None else []
        self.views = HeadViews(*notifiers, spans=Spans(self._on_end))

    def jobs(self, condition: Callable[[], Mapping[str, Any]]) -> dict[str, Job]:
        """Return the jobs that export, by name. `condition`: returns the body of /healthz."""
        jobs: dict[str, Job] = {}
        if self._notifier is not None:
            jobs["notifier"] = partial(self._notifier.run, condition)
        if self._tracing is not None:
            jobs["traces"] = self._tracing.run
        return jobs

    def alarms(self) -> list[Alarm]:
        """Return what does not reach the outside, a line each."""
        return self._notifier.alarms() if self._notifier is not None else []

    def _on_end(self, spans: Sequence[Span], state: ClusterState) -> None:
        if self._tracing is not None and self._leads():
            self._tracing.ended(spans, mask_of(state).text)


def _tracing(url: str) -> Tracing:
    extras.require("traces_url", "otel")
    from unicrond.service.export.tracing import Tracing

    return Tracing(url)


def _without_secrets(state: ClusterState, text: str) -> str:
    return mask_of(state).text(text)
