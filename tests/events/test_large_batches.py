"""Batches of decisions that are larger than what a server keeps in memory before it stores it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.contracts.logs import started
from tests.golden.regenerate import example
from unicrond.events import vocabulary as v
from unicrond.events.log.event_log import MAX_BATCH
from unicrond.events.nats import server
from unicrond.events.nats.connection import connect
from unicrond.events.nats.event_log import UNANSWERED_BYTES, NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.wire.envelope import Envelope


def starts(batch: int) -> list[Envelope]:
    """As many orders as one batch holds, of a task with an environment of 16 KB."""
    order = example(v.StartWorker).event
    assert isinstance(order, v.StartWorker)
    spec = replace(order.spec, env={f"NAME_{number}": "x" * 1_000 for number in range(16)})
    numbers = range(batch * MAX_BATCH + 1, (batch + 1) * MAX_BATCH + 1)
    orders = [replace(order, spec=spec, epoch=1, command_id=f"1.1.{order.node}.{number}") for number in numbers]
    return [
        Envelope(producer="coordinator", boot=1, number=number, term=1, observed_at_us=1, event=event)
        for number, event in zip(numbers, orders, strict=True)
    ]


@pytest.mark.timeout(60)
async def test_batch_beyond_what_server_buffers_is_written_at_first_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent in one go, refused where the server was slower than its client, and sent again from its beginning."""
    monkeypatch.setattr(server, "BUFFERED_BYTES", 1 << 20)
    nats_server = EmbeddedServer(tmp_path / "nats", dies_with_us=True)
    await nats_server.start()
    connection = await connect(nats_server.url, name="head", timeout_s=10)
    try:
        await create_streams(connection)
        log = NatsEventLog(connection)
        fence = await log.claim_term(started(1))
        for batch in range(2):
            seqs = await log.append(starts(batch), fence=fence)
            assert seqs == list(range(seqs[0], seqs[0] + MAX_BATCH))
        said = (nats_server.directory / "nats-server.log").read_text()
        assert "excessive stream ingest rate" not in said, "it has dropped a message"
    finally:
        await connection.close()
        await nats_server.kill()


def test_server_buffers_several_times_what_a_batch_sends_unanswered() -> None:
    assert server.BUFFERED_BYTES >= 4 * UNANSWERED_BYTES
