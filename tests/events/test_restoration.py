"""A stream that was deleted is made again from the archive: the same entries, numbers and times; or none is made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.events.test_archive import entries, said, term
from tests.replay.logs import fill, troubled
from unicrond.events.archive.archive import archive
from unicrond.events.archive.archived_log import ArchivedLog
from unicrond.events.archive.restoration import require_none, require_restored, restore_stream, survey
from unicrond.events.log.event_log import Fenced, LogDamaged, LogError
from unicrond.events.log.segments import segment_name
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, event_stream_config
from unicrond.events.trust.keys import load_or_create_key
from unicrond.events.trust.logins import Role
from unicrond.events.wire.envelope import QuarantinedMessage


@pytest.fixture
async def operator(tmp_path: Path) -> AsyncIterator[tuple[Connection, Connection]]:
    """The operator's and the coordinator's connection to a locked server that has no log."""
    keys = [load_or_create_key(tmp_path / "keys", role) for role in (Role.OPERATOR, Role.COORDINATOR)]
    server = EmbeddedServer(tmp_path / "target", users=[key.user for key in keys], dies_with_us=True)
    await server.start()
    connections = [
        await connect(server.url, name=role, login=Login(key=tmp_path / "keys" / f"{role}.key"), timeout_s=10)
        for role in (Role.OPERATOR, Role.COORDINATOR)
    ]
    yield connections[0], connections[1]
    for connection in connections:
        await connection.close()
    await server.kill()


async def archived(connection: Connection, directory: Path) -> NatsEventLog:
    """A log with trouble in it, and with three messages that are no events, in the archive too."""
    log = NatsEventLog(connection)
    await fill(log, troubled(3).log)
    session = await connection.session()
    for on_subject, body in (
        ("unicron.v1.obs.n1.Nonsense", b"{"),
        ("unicron.v1.obs.n1.NodeJoined", b""),
        ("unicron.v1.command.n\u00e9.x", b"\x00\xff" * 700),
    ):
        await session.request(on_subject, body)
    await log.append([said(1)])
    await archive(connection, directory)
    return log


async def test_restored_log_has_same_entries(
    nats_connection: Connection, operator: tuple[Connection, Connection], tmp_path: Path
) -> None:
    log = await archived(nats_connection, tmp_path / "archive")
    before = await entries(log)
    assert sum(isinstance(entry, QuarantinedMessage) for entry in before) >= 3
    by_operator, by_coordinator = operator
    contents, steps = survey(tmp_path / "archive", None), []
    await restore_stream(
        by_coordinator,
        by_operator,
        tmp_path / "archive",
        contents,
        tmp_path / "scratch",
        progress=lambda *step: steps.append(step),
    )
    assert steps[-1][1] == steps[-1][2]
    restored = NatsEventLog(by_coordinator)
    assert await entries(restored) == before
    info = await api(by_operator, f"STREAM.INFO.{EVENT_STREAM}", {})
    assert {name: info["config"][name] for name in event_stream_config()} == event_stream_config()
    fence = await restored.claim_term(term(1_000))
    assert fence.seq == len(before) + 1
    with pytest.raises(Fenced, match="is not above term"):
        await restored.claim_term(term(3))
    await require_restored(by_coordinator, contents)  # though a cluster has gone on with it
    await log.append([said(1_000_000)])
    await archive(nats_connection, tmp_path / "archive")
    with pytest.raises(LogDamaged, match=rf"entry {fence.seq} of the event log is another than the one that the arch"):
        await require_restored(by_coordinator, survey(tmp_path / "archive", None))


async def test_log_with_entries_is_not_overwritten(
    nats_connection: Connection, operator: tuple[Connection, Connection], tmp_path: Path
) -> None:
    log = await archived(nats_connection, tmp_path / "archive")
    before, contents = await entries(log), survey(tmp_path / "archive", None)
    with pytest.raises(LogError, match=r"holds entries, up to .*; a log is never overwritten"):
        await restore_stream(nats_connection, nats_connection, tmp_path / "archive", contents, tmp_path / "scratch")
    assert await entries(log) == before
    by_operator, by_coordinator = operator
    assert not await require_none(by_operator)
    await api(by_operator, f"STREAM.CREATE.{EVENT_STREAM}", event_stream_config())
    assert await require_none(by_operator), "empty: nothing is lost"
    await restore_stream(by_coordinator, by_operator, tmp_path / "archive", contents, tmp_path / "other")


async def test_damaged_archive_restores_nothing(
    nats_connection: Connection, operator: tuple[Connection, Connection], tmp_path: Path
) -> None:
    await archived(nats_connection, tmp_path / "archive")
    segment = tmp_path / "archive" / segment_name(1)
    content = segment.read_bytes()
    segment.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(LogDamaged):
        survey(tmp_path / "archive", None)
    assert not await require_none(operator[0])


async def test_old_entries_stay_in_archive(
    nats_connection: Connection, operator: tuple[Connection, Connection], tmp_path: Path
) -> None:
    log = await archived(nats_connection, tmp_path / "archive")
    before = await entries(log)
    contents = survey(tmp_path / "archive", 0.0)
    assert 1 <= contents.first_seq <= len(before)
    await restore_stream(operator[1], operator[0], tmp_path / "archive", contents, tmp_path / "scratch")
    whole = ArchivedLog(NatsEventLog(operator[1]), tmp_path / "archive")
    assert await entries(whole) == before
    assert await NatsEventLog(operator[1]).newest_term() == await log.newest_term()
