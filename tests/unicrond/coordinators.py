"""A coordinator in its loop, over logs in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from tests.contracts.memory_log import MemoryBeatLog, MemoryLog
from unicrond.core.state.policy import Policy
from unicrond.events.vocabulary import ErrorKind, SeverityLevel
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.snapshots import Snapshots
from unicrond.service.coordinator.surroundings import HeadSettings


@asynccontextmanager
async def running(
    log: MemoryLog,
    beats: MemoryBeatLog | None = None,
    *,
    heartbeat_s: float = 0.2,
    severity: Mapping[ErrorKind, SeverityLevel] | None = None,
    snapshots: Snapshots | None = None,
    adopted_us: int = 0,
    policy: Policy | None = None,
) -> AsyncIterator[Coordinator]:
    """A coordinator that is live; it is cancelled at the end."""
    coordinator = Coordinator(
        log,
        beats or MemoryBeatLog(),
        HeadSettings(
            policy=policy or Policy(), heartbeat_s=heartbeat_s, severity=severity or {}, adopted_us=adopted_us
        ),
        snapshots=snapshots,
    )
    task = asyncio.create_task(coordinator.run())
    try:
        await asyncio.wait_for(coordinator.live.wait(), 30)
        yield coordinator
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
