"""The event log as a coordinator's HTTP API gives it: for whoever has a token, and no login to NATS.

What the API keeps back (secrets in tasks' environments) is hidden in the entries as well. It gives no heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from itertools import islice

from events.envelope import Entry, Recorded
from events.log import LogDamaged, LogUnavailable
from replay.reading.source import CHUNK_ENTRIES, Chunk
from unicrond.ctl.client import ApiError, Client


class ApiSource:
    """See Source: the log up to the entry that the coordinator had folded when it was opened."""

    has_own_times = True

    def __init__(self, client: Client, last_seq: int, last_us: int) -> None:
        self.client = client
        self.last_seq = last_seq
        self._last_us = last_us

    async def chunks(self, after_seq: int = 0) -> AsyncGenerator[Chunk, None]:
        """See Source. Raises LogUnavailable where the API does not give all of it."""
        entries = self.client.entries(after_seq, self.last_seq)
        while after_seq < self.last_seq:
            some = await asyncio.to_thread(_some, entries)
            after_seq = some[-1].seq
            yield Chunk(some, after_seq / self.last_seq)

    async def skips(self) -> dict[int, str]:
        """See Source. None: the client has passed over them."""
        return {}

    async def end_us(self) -> int:
        """See Source."""
        return self._last_us

    async def beats(self) -> AsyncGenerator[list[Recorded], None]:
        """See Source. None."""
        none: list[list[Recorded]] = []
        for some in none:
            yield some


async def open_api(client: Client) -> ApiSource:
    """The log behind the API. LogUnavailable where it does not answer."""
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


def _some(entries: Iterator[Entry]) -> list[Entry]:
    try:
        return list(islice(entries, CHUNK_ENTRIES))
    except ApiError as error:
        raise LogUnavailable(str(error)) from None
