"""The event stream is asked whether it would take an append, before anybody has one to make."""

from __future__ import annotations

import pytest

from tests.unicrond.test_coordinator import observation
from unicrond.events import vocabulary as v
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.log_proof import LogProof
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, create_streams, event_stream_config
from unicrond.service.event_log.stream_probe import StreamProbe


async def append(log: NatsEventLog, *numbers: int) -> None:
    for number in numbers:
        await log.append([observation(v.CommandFailed(node="n1", command_id="x", reason="r"), number)])


async def edit(connection: Connection, **changes: object) -> None:
    await api(connection, f"STREAM.UPDATE.{EVENT_STREAM}", {**event_stream_config(), **changes})


@pytest.mark.parametrize(
    ("limit", "flag"), [({"max_msgs": 3}, "--max-msgs=-1"), ({"max_bytes": 200}, "--max-bytes=-1")]
)
async def test_probe_names_stream_limit_and_cure(
    nats_connection: Connection, limit: dict[str, object], flag: str
) -> None:
    probe = StreamProbe(nats_connection, LogProof(), lambda: 3)
    await append(NatsEventLog(nats_connection), 1, 2, 3)
    await probe.look()
    assert probe.trouble == "" and not probe.is_settled
    await edit(nats_connection, **limit)
    await probe.look()
    assert flag in probe.trouble and probe.is_settled
    await edit(nats_connection)
    await probe.look()
    assert probe.trouble == ""


async def test_probe_detects_missing_or_recreated_stream(nats_connection: Connection) -> None:
    probe = StreamProbe(nats_connection, LogProof(), lambda: 2)
    await append(NatsEventLog(nats_connection), 1, 2)
    await probe.look()
    assert probe.trouble == ""
    await api(nats_connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
    await probe.look()
    assert "NATS has no event log, and this head has read one of 2 entries; restore it" in probe.trouble
    assert probe.is_settled
    await create_streams(nats_connection)
    await probe.look()
    assert "ends at entry 0, and the coordinator has read 2" in probe.trouble


async def test_probe_treats_absent_server_as_unsettled(
    nats_server: EmbeddedServer, nats_connection: Connection
) -> None:
    probe = StreamProbe(nats_connection, LogProof(), lambda: 0)
    await nats_server.kill()
    await probe.look()
    assert "does not answer" in probe.trouble and not probe.is_settled
    await nats_server.start()
    await nats_connection.session()
    await probe.look()
    assert probe.trouble == ""
