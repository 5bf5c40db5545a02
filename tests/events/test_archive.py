"""What was trimmed stands in the archive; log and archive together are the log as it was; nothing else can go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from unicrond.events import vocabulary as v
from unicrond.events.archive import archive as module
from unicrond.events.archive.archive import CannotTrim, archive, trim
from unicrond.events.archive.archived_log import ArchivedLog
from unicrond.events.log.event_log import EventLog, LogDamaged
from unicrond.events.log.segments import segment_name
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.streams import NANOS, TRIMMING, JetStreamError, api, create_streams, event_stream_config
from unicrond.events.wire.envelope import Entry, Envelope


def said(number: int) -> Envelope:
    event = v.CommandApplied(node="n1", command_id=str(number))
    return Envelope(producer="n1", boot=1, number=number, observed_at_us=number, event=event)


def term(number: int) -> Envelope:
    event = v.CoordinatorStarted(term=number, version="test")
    return Envelope(producer="coordinator", boot=number, number=1, term=number, observed_at_us=1, event=event)


async def entries(log: EventLog, after: int = 0) -> list[Entry]:
    return [entry async for entry in log.read(after, until_seq=await log.last_seq())]


async def info(connection: Connection) -> dict:
    return await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})


async def filled(connection: Connection) -> tuple[NatsEventLog, list[Entry]]:
    """Two terms, 40 entries, and a pause of a second before the second term.

    An age limit may not be shorter than the duplicate window; ours of a second needs a shorter window.
    """
    short = {**event_stream_config(), "duplicate_window": NANOS // 10}
    await api(connection, f"STREAM.UPDATE.{EVENT_STREAM}", short)
    log = NatsEventLog(connection)
    await log.claim_term(term(1))
    await log.append([said(number) for number in range(1, 21)])
    await asyncio.sleep(1.0)
    await log.claim_term(term(2))
    await log.append([said(number) for number in range(21, 39)])
    return log, await entries(log)


async def test_log_with_archive_matches_original(nats_connection: Connection, tmp_path: Path) -> None:
    log, before = await filled(nats_connection)
    assert await archive(nats_connection, tmp_path) == (40, 40, 0)
    assert await trim(nats_connection, tmp_path, 0.8, keep_least_s=0.0) == 21
    now = await info(nats_connection)
    assert now["state"]["first_seq"] == 22
    assert now["config"].get("max_age", 0) == 0 and TRIMMING not in (now["config"].get("metadata") or {})
    assert now["config"]["deny_purge"] and now["config"]["deny_delete"]
    whole = ArchivedLog(log, tmp_path)
    assert await entries(whole) == before
    for after in (0, 5, 20, 21, 22, 39, 40):
        assert await entries(whole, after) == before[after:]
    assert [e.seq async for e in whole.read(3, until_seq=7)] == [4, 5, 6, 7]
    assert [e.seq async for e in whole.read(38, until_seq=40)] == [39, 40]
    with pytest.raises(LogDamaged, match="entries 1 to 21 are missing"):
        await entries(log)


async def test_log_and_archive_continue_after_trim(nats_connection: Connection, tmp_path: Path) -> None:
    log, before = await filled(nats_connection)
    await archive(nats_connection, tmp_path)
    await trim(nats_connection, tmp_path, 0.8, keep_least_s=0.0)
    fence = await log.claim_term(term(3))
    await log.append([said(100)], fence=None)
    assert fence.seq == 41
    assert await archive(nats_connection, tmp_path) == (42, 2, 0)
    assert await archive(nats_connection, tmp_path) == (42, 0, 0)
    assert (await entries(ArchivedLog(log, tmp_path)))[:40] == before


async def test_trim_keeps_fencing_entry(nats_connection: Connection, tmp_path: Path) -> None:
    log = NatsEventLog(nats_connection)
    fence = await log.claim_term(term(1))
    await log.append([said(number) for number in range(1, 6)])
    await asyncio.sleep(0.3)
    await archive(nats_connection, tmp_path)
    with pytest.raises(CannotTrim, match="term began with entry 1, and must stay; restart the coordinator"):
        await trim(nats_connection, tmp_path, 0.1, keep_least_s=0.0)
    decision = Envelope(
        producer="coordinator",
        boot=1,
        number=2,
        term=1,
        observed_at_us=1,
        event=v.DeadlineExpired(deadline_id="x"),
    )
    await log.append([decision], fence=fence)
    assert (await info(nats_connection))["state"]["first_seq"] == 1


async def test_trim_removes_only_archived_entries(nats_connection: Connection, tmp_path: Path) -> None:
    await filled(nats_connection)
    with pytest.raises(CannotTrim, match="holds nothing of the stream; archive first"):
        await trim(nats_connection, tmp_path / "none", 0.8, keep_least_s=0.0)
    with pytest.raises(CannotTrim, match=r"keep: 0\.8 s is too short; keep 3600 s or more"):
        await trim(nats_connection, tmp_path, 0.8)
    assert (await info(nats_connection))["state"]["first_seq"] == 1


async def test_server_refuses_purge_and_its_permission(nats_connection: Connection) -> None:
    await filled(nats_connection)
    with pytest.raises(JetStreamError, match="purge not permitted"):
        await api(nats_connection, f"STREAM.PURGE.{EVENT_STREAM}", {"seq": 10})
    with pytest.raises(JetStreamError, match="can not cancel deny purge"):
        await api(nats_connection, f"STREAM.UPDATE.{EVENT_STREAM}", {**event_stream_config(), "deny_purge": False})


async def test_leftover_limit_of_crashed_trim_is_removed(
    nats_connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, before = await filled(nats_connection)
    await archive(nats_connection, tmp_path)

    async def crash(connection: Connection, found: dict, age_ns: int) -> None:
        await real(connection, found, 3600 * NANOS)
        raise asyncio.CancelledError

    real, end = module._set_limit, module.end_trim
    monkeypatch.setattr(module, "_set_limit", crash)
    with pytest.raises(asyncio.CancelledError):
        await trim(nats_connection, tmp_path, 0.8, keep_least_s=0.0)
    now = await info(nats_connection)
    assert now["config"]["max_age"] == 3600 * NANOS and TRIMMING in now["config"]["metadata"]
    assert end is module.end_trim
    await create_streams(nats_connection)
    now = await info(nats_connection)
    assert now["config"].get("max_age", 0) == 0 and TRIMMING not in now["config"].get("metadata", {})
    assert await entries(log) == before


async def test_archive_of_other_log_is_refused(nats_connection: Connection, tmp_path: Path) -> None:
    log, _ = await filled(nats_connection)
    await archive(nats_connection, tmp_path)
    name = f"STREAM.DELETE.{EVENT_STREAM}"
    await api(nats_connection, name, {})
    await create_streams(nats_connection)
    with pytest.raises(LogDamaged, match="beyond the log's end: this is another log's archive"):
        await entries(ArchivedLog(log, tmp_path))
    await filled(nats_connection)
    with pytest.raises(LogDamaged, match="entry 40 is not the log's: this is another log's archive"):
        await archive(nats_connection, tmp_path)


async def test_truncated_archive_is_continued(nats_connection: Connection, tmp_path: Path) -> None:
    log, before = await filled(nats_connection)
    await archive(nats_connection, tmp_path)
    segment = tmp_path / segment_name(1)
    await log.append([said(number) for number in range(50, 60)])
    await archive(nats_connection, tmp_path)
    segment.write_bytes(segment.read_bytes()[:-7])
    whole = ArchivedLog(log, tmp_path)
    assert (await entries(whole))[:40] == before and len(await entries(whole)) == 50
    assert await archive(nats_connection, tmp_path) == (50, 10, 0)


async def test_missing_archive_leaves_plain_log(nats_connection: Connection, tmp_path: Path) -> None:
    log, before = await filled(nats_connection)
    assert await entries(ArchivedLog(log, tmp_path / "none")) == before
