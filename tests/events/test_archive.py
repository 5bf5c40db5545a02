"""What was trimmed stands in the archive; log and archive together are the log as it was; nothing else can go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from unicrond.events import vocabulary as v
from unicrond.events.archive import archive as module
from unicrond.events.archive import follower as follower_module
from unicrond.events.archive.archive import CannotTrim, adopt, archive, trim
from unicrond.events.archive.archived_log import ArchivedLog, archived_batches, archived_beats, newest_archived
from unicrond.events.archive.follower import ArchiveFollower, ArchiveResult
from unicrond.events.log.event_log import EventLog, LogDamaged, LogError
from unicrond.events.log.segment_writer import LogBusy, SegmentWriter
from unicrond.events.log.segments import batch_frame, read_entries, segment_name, segment_paths
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.streams import (
    NANOS,
    TRIMMING,
    JetStreamError,
    api,
    api_once,
    create_streams,
    event_stream_config,
)
from unicrond.events.wire.envelope import Entry, Envelope


def said(number: int) -> Envelope:
    event = v.CommandApplied(node="n1", command_id=str(number))
    return Envelope(producer="n1", boot=1, number=number, observed_at_us=number, event=event)


def term(number: int) -> Envelope:
    event = v.CoordinatorStarted(term=number, version="test")
    return Envelope(producer="coordinator", boot=number, number=1, term=number, observed_at_us=1, event=event)


async def entries(log: EventLog, after: int = 0) -> list[Entry]:
    return [entry async for entry in log.read(after, until_seq=await log.last_seq())]


#: Where what is older goes, and what comes after does not.
PAUSE_S = 3.0


async def info(connection: Connection) -> dict:
    return await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})


async def filled(connection: Connection, pause_s: float = 0.0) -> tuple[NatsEventLog, list[Entry]]:
    """Two terms, 40 entries, and a pause before the second term.

    An age limit may not be shorter than the duplicate window; ours of a second needs a shorter window.
    """
    short = {**event_stream_config(), "duplicate_window": NANOS // 10}
    await api(connection, f"STREAM.UPDATE.{EVENT_STREAM}", short)
    log = NatsEventLog(connection)
    await log.claim_term(term(1))
    await log.append([said(number) for number in range(1, 21)])
    await asyncio.sleep(pause_s)
    await log.claim_term(term(2))
    await log.append([said(number) for number in range(21, 39)])
    return log, await entries(log)


def age_of_pause_s(log: list[Entry]) -> float:
    """Return how old the pause before the second term is now, near its first end: until the server removes what is
    older a busy machine may take nearly as long as the pause."""
    return time.time() - log[20].recorded_at_us / 1e6 - 0.05


async def test_log_with_archive_matches_original(nats_connection: Connection, tmp_path: Path) -> None:
    log, before = await filled(nats_connection, PAUSE_S)
    assert await archive(nats_connection, tmp_path) == (40, 40, 0)
    assert await trim(nats_connection, tmp_path, age_of_pause_s(before), keep_least_s=0.0) == 21
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
    log, before = await filled(nats_connection, PAUSE_S)
    await archive(nats_connection, tmp_path)
    await trim(nats_connection, tmp_path, age_of_pause_s(before), keep_least_s=0.0)
    fence = await log.claim_term(term(3))
    await log.append([said(100)], fence=None)
    assert fence.seq == 41
    assert await archive(nats_connection, tmp_path) == (42, 2, 0)
    assert await archive(nats_connection, tmp_path) == (42, 0, 0)
    assert (await entries(ArchivedLog(log, tmp_path)))[:40] == before


async def test_trim_keeps_what_has_grown_old_while_it_read_back(
    nats_connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long archive takes its time: what that makes old enough to go was not looked at, the term's claim among it."""
    log, before = await filled(nats_connection, PAUSE_S)
    await archive(nats_connection, tmp_path)

    def slowly(*arguments: Any) -> None:
        time.sleep(PAUSE_S + 1.0)
        read_back(*arguments)

    read_back = module._read_back
    monkeypatch.setattr(module, "_read_back", slowly)
    assert await trim(nats_connection, tmp_path, age_of_pause_s(before), keep_least_s=0.0) == 21
    assert await entries(log, 21) == before[21:]


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
    log, before = await filled(nats_connection, PAUSE_S)
    await archive(nats_connection, tmp_path)

    async def crash(connection: Connection, found: dict, age_ns: int) -> None:
        await real(connection, found, 3600 * NANOS)
        raise asyncio.CancelledError

    real, end = module._set_limit, module.end_trim
    monkeypatch.setattr(module, "_set_limit", crash)
    with pytest.raises(asyncio.CancelledError):
        await trim(nats_connection, tmp_path, age_of_pause_s(before), keep_least_s=0.0)
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


async def follows(follower: ArchiveFollower, results: list[ArchiveResult], last_seq: int) -> asyncio.Task[None]:
    """A follower that has archived up to `last_seq`."""
    task = asyncio.create_task(follower.follow())
    async with asyncio.timeout(20):
        while not task.done() and (not results or results[-1].last_seq < last_seq):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return task


async def test_deleted_log_ends_following_once_all_that_was_read_is_written(
    nats_connection: Connection, tmp_path: Path
) -> None:
    """The delay is longer than the test: only the end of the log has the last entries written."""
    log, _ = await filled(nats_connection)
    await archive(nats_connection, tmp_path)
    results: list[ArchiveResult] = []
    follower = ArchiveFollower(nats_connection, tmp_path, 3600.0, results.append)
    task = await follows(follower, results, 40)
    await log.append([said(100), said(101)])
    async with asyncio.timeout(20):
        while follower.read_seq < 42:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert results[-1].last_seq == 40
    await api(nats_connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
    with pytest.raises(LogError, match="NATS has no event log"):
        await asyncio.wait_for(task, 20)
    assert results[-1] == (42, 2, 0)
    SegmentWriter(tmp_path).close()  # the lock is free


async def test_entries_that_come_behind_the_answer_about_the_end_are_no_fault(
    nats_connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's answer is under way while the next entry is read."""
    log, _ = await filled(nats_connection)
    results: list[ArchiveResult] = []
    follower = ArchiveFollower(nats_connection, tmp_path, 0.0, results.append)
    answers = 0

    async def slowly(*arguments: Any) -> dict[str, Any]:
        nonlocal answers
        answer = await api_once(*arguments)
        if follower.read_seq >= 40:
            answers += 1
            await log.append([said(100 + answers)])
            while follower.read_seq < 40 + answers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return answer

    monkeypatch.setattr(follower_module, "api_once", slowly)
    monkeypatch.setattr(follower_module, "_LOOK_S", 0.2)
    task = await follows(follower, results, 40)
    async with asyncio.timeout(20):
        while answers < 3:
            await asyncio.sleep(0.01)
            assert not task.done(), await task
    follower.stop()
    await asyncio.wait_for(task, 20)


async def test_follower_that_is_stopped_has_written_what_it_read(nats_connection: Connection, tmp_path: Path) -> None:
    await filled(nats_connection)
    results: list[ArchiveResult] = []
    follower = ArchiveFollower(nats_connection, tmp_path, 3600.0, results.append)
    task = asyncio.create_task(follower.follow())
    async with asyncio.timeout(20):
        while follower.read_seq < 40:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    follower.stop()
    await asyncio.wait_for(task, 20)
    newest = newest_archived(tmp_path)
    assert results[-1].last_seq == 40 and newest is not None and newest.seq == 40


async def test_entries_wait_for_no_heartbeats(
    nats_connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where NATS does not give the beats of a loss, the entry goes into the archive, and the beats come with a later
    one."""
    log, _ = await filled(nats_connection)
    sign = v.Heartbeat(node="n2", agent_boot=1, beat=1, workers=0, load_milli=0, memory_free_bytes=0)
    beat = Envelope(producer="n2", boot=1, number=1, observed_at_us=1, event=sign)
    await NatsBeatLog(nats_connection).publish(beat)
    results: list[ArchiveResult] = []
    monkeypatch.setattr(follower_module, "_EVIDENCE_S", 0.0)
    follower = ArchiveFollower(nats_connection, tmp_path, 0.0, results.append)
    task = await follows(follower, results, 40)
    event = v.NodeLost(node="n2", reason="", evidence=v.Evidence(beat_seq=1, beat_at_us=1))
    fence = await log.claim_term(term(3))
    lost = Envelope(producer="coordinator", boot=3, number=2, term=3, observed_at_us=1, event=event)
    await log.append([lost], fence=fence)
    async with asyncio.timeout(20):
        while results[-1].last_seq < 42:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert sum(result.beats for result in results) == 0
    monkeypatch.setattr(follower_module, "_EVIDENCE_S", 10.0)
    await log.append([said(100)])
    async with asyncio.timeout(20):
        while results[-1].last_seq < 43:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    follower.stop()
    await task
    assert [beat.envelope.producer for batch in archived_beats(tmp_path) for beat in batch] == ["n2"]


async def test_two_writers_without_locks_do_not_mix(nats_connection: Connection, tmp_path: Path) -> None:
    """Locks do not hold: who finds that the file has grown by another's hand writes nothing more."""
    log, before = await filled(nats_connection)
    results: list[ArchiveResult] = []
    task = await follows(ArchiveFollower(nats_connection, tmp_path, 0.0, results.append), results, 40)
    (segment,) = segment_paths(tmp_path)
    with segment.open("ab") as file:
        file.write(batch_frame([replace(before[-1], seq=41)]))
    await log.append([said(100)])
    with pytest.raises(LogBusy, match="another process has written"):
        await asyncio.wait_for(task, 20)
    assert [e.seq for batch in archived_batches(tmp_path) for e in batch] == list(range(1, 42))


class ListedLog:
    """A log of these entries, as far as it is compared with an archive."""

    def __init__(self, listed: list[Entry]) -> None:
        self.listed = listed

    async def last_seq(self) -> int:
        return len(self.listed)

    async def read(self, after_seq: int = 0, *, until_seq: int | None = None) -> AsyncGenerator[Entry, None]:
        for entry in self.listed[after_seq:until_seq]:
            yield entry


@pytest.mark.parametrize(("count", "segment_bytes"), [(0, 10**6), (7, 10**6), (22, 2000), (39, 2000)])
async def test_archive_becomes_one_of_log_that_a_person_takes(
    nats_connection: Connection, tmp_path: Path, count: int, segment_bytes: int
) -> None:
    """The log ends after `count` entries, or is another one: what it has stays, and the rest is set aside."""
    nats_log, before = await filled(nats_connection)
    writer = SegmentWriter(tmp_path, segment_bytes=segment_bytes)
    for entry in before:
        writer.write([entry])
    writer.close()
    assert await adopt(nats_log, tmp_path, "aside") is None, "it is this log's"
    log = ListedLog(before[:count] or [replace(entry, recorded_at_us=1) for entry in before[:3]])
    assert await adopt(log, tmp_path, "aside") == tmp_path / "aside"
    assert [e for batch in archived_batches(tmp_path) for e in batch] == before[:count]
    aside = [entry.seq for entry in read_entries(tmp_path / "aside")]
    assert aside[0] <= count + 1 and aside[-1] == 40
    assert await adopt(log, tmp_path, "again") is None
