"""An agent asks for a backlog of commands at a pace."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from tests.contracts.logs import command, started
from unicrond.events.log.entrance import READS
from unicrond.events.nats.commands import NatsCommandFeed
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog

BEYOND = 400


async def test_backlog_is_asked_for_at_a_pace(nats_connection: Connection) -> None:
    """Until then an agent that had to read some thousand commands lost its login for a flood of calls."""
    log = NatsEventLog(nats_connection)
    fence = await log.claim_term(started(1))
    count = READS.size + BEYOND
    await log.append([command(number) for number in range(1, count + 1)], fence=fence)
    feed = NatsCommandFeed(nats_connection, "n1")
    await feed.follow(())
    start_s = time.monotonic()
    seqs = []
    async with asyncio.timeout(60), aclosing(feed.read()) as commands:
        async for entry in commands:
            seqs.append(entry.seq)
            if len(seqs) == count:
                break
    assert seqs == sorted(seqs)
    assert time.monotonic() - start_s > 0.9 * BEYOND * READS.every_us / 1e6
