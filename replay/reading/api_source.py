"""The event log as a coordinator's HTTP API returns it: for people who have a token, and no login to NATS.

Secrets in tasks' environments, which the API hides, are hidden in the entries as well. The API has no heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from itertools import islice

from unicrond.ctl.client import ApiError, Client
from unicrond.events.log.event_log import LogDamaged, LogUnavailable
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.replay.reading.source import CHUNK_ENTRIES, LogChunk


class ApiSource:
    """Read the log up to the entry that the coordinator had folded when it was opened. See Source."""

    has_own_times = True

    def __init__(self, client: Client, last_seq: int, last_us: int) -> None:
        self.client = client
        self.last_seq = last_seq
        self._last_us = last_us

    async def chunks(self, after_seq: int = 0) -> AsyncGenerator[LogChunk, None]:
        """Yield the entries; see Source. Raises LogUnavailable where the API does not return all of them."""
        entries = self.client.entries(after_seq, self.last_seq)
        while after_seq < self.last_seq:
            batch = await asyncio.to_thread(_next_batch, entries)
            after_seq = batch[-1].seq
            yield LogChunk(batch, after_seq / self.last_seq)

    async def skips(self) -> dict[int, str]:
        """Return no skips, since the client has left those entries out; see Source."""
        return {}

    async def end_us(self) -> int:
        """Return when the newest entry was recorded; see Source."""
        return self._last_us

    async def beats(self) -> AsyncGenerator[list[RecordedEvent], None]:
        """Yield nothing: the API has no heartbeats; see Source."""
        empty: list[list[RecordedEvent]] = []
        for batch in empty:
            yield batch


async def open_api(client: Client) -> ApiSource:
    """Open the log behind the API. Raises LogUnavailable where it does not answer, LogDamaged where it lacks its last
    entry."""
    try:
        last_seq = int((await asyncio.to_thread(client.health))["seq"])
        last_us = 0
        if last_seq:
            newest = await asyncio.to_thread(lambda: next(client.events(last_seq - 1, until=last_seq)))
            last_us = newest.recorded_at_us
    except ApiError as error:
        raise LogUnavailable(str(error)) from None
    except StopIteration:
        raise LogDamaged(f"{client.url}: entry {last_seq} is not in the log") from None
    return ApiSource(client, last_seq, last_us)


def _next_batch(entries: Iterator[Entry]) -> list[Entry]:
    try:
        return list(islice(entries, CHUNK_ENTRIES))
    except ApiError as error:
        raise LogUnavailable(str(error)) from None
