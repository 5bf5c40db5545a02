"""Starts what exports events to the outside: notices (notifier.py), traces (tracing.py).

Where the configuration names no destination, nothing starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from unicrond.events.host import optional_dependencies as extras
from unicrond.intake.config import Config
from unicrond.service.api.api import Api
from unicrond.service.api.redaction import mask_of
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.export.notifier import Notifier
from unicrond.views.spans import Span


def telling(config: Config, coordinator: Coordinator, api: Api) -> list[asyncio.Task[None]]:
    """Start the exporters that the configuration asks for, and return their tasks. Raises MissingExtra."""
    return _notices(config, coordinator, api) + _traces(config, coordinator)


def _notices(config: Config, coordinator: Coordinator, api: Api) -> list[asyncio.Task[None]]:
    if not config.notify.to and not config.notify.heartbeat_url:
        return []
    notifier = Notifier(
        config.notify,
        lambda: coordinator.state,
        api.condition,
        coordinator.live.is_set,
        hide=lambda text: mask_of(coordinator.state).text(text),
    )
    coordinator.around.folded = notifier.folded
    coordinator.around.add_alarms(notifier.alarms)
    return [asyncio.create_task(notifier.run(), name="notifier")]


def _traces(config: Config, coordinator: Coordinator) -> list[asyncio.Task[None]]:
    if not config.traces_url:
        return []
    extras.require("traces_url", "otel")
    from unicrond.service.export.tracing import Tracing

    tracing = Tracing(config.traces_url)

    def ended(spans: Sequence[Span]) -> None:
        """Export the spans if this coordinator leads, without secrets."""
        if coordinator.live.is_set():
            tracing.ended(spans, mask_of(coordinator.state).text)

    coordinator.bookkeeper.ended = ended
    return [asyncio.create_task(tracing.run(), name="traces")]
