"""The event stream is asked whether it would take an append, before anybody has one to make."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from tests import nats_snapshots
from tests.unicrond.test_coordinator import observation
from unicrond.events import vocabulary as v
from unicrond.events.log.event_log import AnotherLog
from unicrond.events.log.log_identity import mark_of
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


async def test_probe_tells_when_a_restore_that_it_saw_under_way_is_complete(nats_connection: Connection) -> None:
    """A backup of two entries, then the log of three again: known by its entries; a third that is another is not."""
    told: list[str] = []
    proof, log = LogProof(), NatsEventLog(nats_connection)
    probe = StreamProbe(nats_connection, proof, lambda: 3, dict, told.append, lambda: told.append("whole"))
    await append(log, 1, 2)
    short = await nats_snapshots.backup(nats_connection, EVENT_STREAM)
    await append(log, 3)
    whole = await nats_snapshots.backup(nats_connection, EVENT_STREAM)
    async with aclosing(log.read(0, until_seq=3)) as entries:
        async for entry in entries:
            proof.note(mark_of(entry))
    await probe.look()
    assert not told
    for _ in range(2):
        await api(nats_connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
        await nats_snapshots.restore(nats_connection, short)
        await probe.look()
        await probe.look()
        assert len(told) == 1 and "ends at entry 2, and the coordinator has read 3" in told[0]
        await api(nats_connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
        await nats_snapshots.restore(nats_connection, whole)
        await probe.look()
        assert told.pop() == "whole" and told.pop() and not probe.mismatch
    await api(nats_connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
    await nats_snapshots.restore(nats_connection, short)
    await probe.look()
    await append(NatsEventLog(nats_connection), 4)
    with pytest.raises(AnotherLog, match="entry 3 of the event log is another"):
        await probe.look()
    assert "whole" not in told


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
