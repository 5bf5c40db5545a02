"""The log is archived and trimmed beside the head: when what is done, what is counted, and what a person is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.replay.logs import fill, troubled
from unicrond.events.archive.archive import archive
from unicrond.events.archive.archived_log import newest_archived
from unicrond.events.log.segment_writer import SegmentWriter
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, create_streams
from unicrond.intake.config import Config, LogConfig, NatsConfig
from unicrond.service.event_log.archive_command import ArchiveOutcome, TrimOrder
from unicrond.service.event_log.retention import LogLife, follow_apart
from unicrond.service.event_log.statistics import GIB, AppendTimes, ArchiveLag, Figures, LogVolume, Stream, alarms

DAY_S = 86_400.0


class Leader:
    def __init__(self, *, leads: bool = True) -> None:
        self.live = asyncio.Event()
        self.renewed = 0
        if leads:
            self.live.set()

    def renew_term(self) -> None:
        self.renewed += 1


def info(oldest_d: float) -> dict[str, Any]:
    """A STREAM.INFO at the end of March."""
    begin = f"2026-03-{31 - int(oldest_d):02d}T00:00:00.123456789Z"
    return {
        "ts": "2026-03-31T00:00:00.123456789Z",
        "state": {"messages": 5, "bytes": 3 * GIB, "first_seq": 11, "last_seq": 15, "first_ts": begin},
    }


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0


class Archiver:
    """Stands for the process that archives."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.outcomes: asyncio.Queue[ArchiveOutcome | Exception] = asyncio.Queue()
        self.count = 0

    async def follow(self, config: Config, trims: asyncio.Queue[TrimOrder]) -> AsyncGenerator[ArchiveOutcome, None]:
        self.count += 1
        self.ended.clear()
        self.begun.set()
        try:
            while True:
                outcome = await self.outcomes.get()
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            self.begun.clear()
            self.ended.set()


def life(
    config: Config,
    oldest_d: float = 3,
    *,
    leads: bool = True,
    folded_seq: int = 15,
    clock: Clock | None = None,
    archiver: Archiver | None = None,
) -> tuple[LogLife, Leader]:
    leader, clock, archiver = Leader(leads=leads), clock or Clock(), archiver or Archiver()
    times, now_s = AppendTimes(lambda: 0.0), lambda: clock.now_s
    return LogLife(config, leader, lambda: info(oldest_d), lambda: folded_seq, times, now_s, archiver.follow), leader


def keeping(days: float, **more: Any) -> Config:
    return Config(log=LogConfig(keep_d=days, **more))


def test_trim_is_ordered_only_for_old_enough_entries() -> None:
    for oldest_d, order in ((3, None), (10, None), (12, TrimOrder(10 * DAY_S))):
        assert life(keeping(10), oldest_d)[0].trim_order() == order


def test_outcomes_are_counted_and_failed_trim_is_alarm() -> None:
    log_life, leader = life(keeping(10))
    log_life.take(ArchiveOutcome(last_seq=14, copied=14, beats=3))
    log_life.take(ArchiveOutcome(last_seq=15, copied=1, beats=1))
    log_life.take(ArchiveOutcome(is_trim=True, removed=4))
    figures = log_life.figures
    assert (figures.archived_seq, figures.archived_beats, figures.removed, figures.failures) == (15, 4, 4, 0)
    log_life.take(ArchiveOutcome(is_trim=True, trim_error="no"))
    assert log_life.alarms() == ["older entries are not removed from NATS: no"] and figures.failures == 1
    too_old = ArchiveOutcome(is_trim=True, trim_error="the term began with entry 3", term_too_old=True)
    log_life.take(too_old)
    assert leader.renewed == 1 and log_life.alarms() == []


def test_archive_is_behind_once_first_entry_has_waited_long() -> None:
    clock = Clock()
    log_life, _ = life(keeping(10), clock=clock)
    log_life.take(ArchiveOutcome(last_seq=13, copied=13))
    clock.now_s += 9
    log_life.take(ArchiveOutcome(error="no room"))
    assert log_life.alarms() == []
    clock.now_s += 2
    (line,) = log_life.alarms()
    assert line == "the archive is behind: it lacks entries 14 to 15, the first for 11 s: no room"
    assert line.key == "archive-behind"
    assert log_life.archive() == {"seq": 13, "behind_entries": 2, "behind_s": 11.0}
    log_life.take(ArchiveOutcome(last_seq=15, copied=2))
    assert log_life.alarms() == [] and log_life.archive() == {"seq": 15, "behind_entries": 0, "behind_s": 0.0}


def test_lag_is_that_of_first_entry_however_long_archive_is_behind() -> None:
    lag = ArchiveLag()
    for number in range(3000):
        lag.look(number + 1, 0, float(number))
    assert lag.seconds(3000.0) == 3000.0
    lag.look(3000, 999, 3000.0)
    assert lag.seconds(3000.0) <= 3000.0 - 998.0
    lag.look(3000, 3000, 3000.0)
    assert lag.seconds(3001.0) == 0.0


async def test_only_head_that_leads_archives() -> None:
    archiver = Archiver()
    log_life, leader = life(keeping(10), leads=False, archiver=archiver)
    running = asyncio.create_task(log_life.run())
    try:
        await asyncio.sleep(0)
        assert not archiver.count and log_life.archive() == {}
        leader.live.set()
        async with asyncio.timeout(60):
            await archiver.begun.wait()
            leader.live.clear()
            await archiver.ended.wait()
            leader.live.set()
            await archiver.begun.wait()
        assert archiver.count == 2
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert archiver.ended.is_set()


async def test_archiver_that_fails_is_begun_again() -> None:
    archiver = Archiver()
    log_life, _ = life(keeping(10), archiver=archiver)
    running = asyncio.create_task(log_life.run())
    try:
        async with asyncio.timeout(60):
            await archiver.begun.wait()
            archiver.outcomes.put_nowait(OSError(24, "Too many open files"))
            await archiver.ended.wait()
            await archiver.begun.wait()
        assert not running.done() and log_life.figures.failure == "[Errno 24] Too many open files"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_retention_follows_configuration() -> None:
    elsewhere = NatsConfig(url="nats://elsewhere:4222")
    assert Config().keep_s == 30 * DAY_S
    assert keeping(7).keep_s == 7 * DAY_S
    assert Config(nats=elsewhere).keep_s is None  # each head has an archive of its own
    assert Config(nats=elsewhere, log=LogConfig(archive_dir="/shared")).keep_s == 30 * DAY_S
    assert Config(nats=elsewhere, log=LogConfig(keep_d=7)).keep_s == 7 * DAY_S
    assert Config(log=LogConfig(archive_lag_s=0)).keep_s is None


FINE = Figures(
    stream=Stream(GIB, 100, 1, 3600.0), disks=(LogVolume("state", "/x", 60 * GIB, 100 * GIB),), append_s=0.001
)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, ""),
        ({"stream": Stream(17 * GIB, 9, 1, 1.0)}, "the log holds 17.0 GiB in NATS, more than log.alarm_gib (16)"),
        ({"stream": Stream(GIB, 9, 1, 33 * DAY_S)}, "the oldest is 33.0 days old, log.keep_d is 30"),
        ({"stream": Stream(GIB, 9, 1, 31.5 * DAY_S)}, ""),
        ({"disks": (LogVolume("archive", "/x", 5 * GIB, 100 * GIB),)}, "the volume of /x has 5.0 GiB free of 100.0"),
        ({"disks": (LogVolume("archive", "/x", 50 * GIB, 1000 * GIB),)}, ""),
        ({"append_s": 0.7}, "appends to the log take 0.70 s, more than log.alarm_append_s"),
        ({"behind_s": 10.0}, ""),
    ],
)
def test_archive_alarm_matches_condition(change: dict[str, Any], line: str) -> None:
    found = alarms(replace(FINE, **change), LogConfig(), 30 * DAY_S)
    assert len(found) == bool(line) and all(line in one for one in found)


def test_append_times_give_counts_and_recent_median() -> None:
    now_s = 0.0
    times = AppendTimes(lambda: now_s)
    for _ in range(19):
        times.took(3.0)
    assert times.usual_s() == 0.0  # too few
    times.took(3.0)
    assert times.usual_s() == 3.0
    now_s = 301.0
    assert times.usual_s() == 0.0
    for seconds in (0.001, 0.0015, 0.003, 40.0):
        for _ in range(5):
            times.took(seconds)
    assert times.usual_s() == pytest.approx(0.00225)
    (family,) = times.metrics()
    found = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    assert found["0.001"] == 5 and found["0.002"] == 10 and found["5.0"] == 35 and found["+Inf"] == 40
    assert found["unicron_log_append_seconds_count"] == 40


@pytest.fixture
def where(tmp_path: Path) -> Callable[..., Config]:
    def made(server: EmbeddedServer) -> Config:
        return Config(state_dir=str(tmp_path / "state"), nats=NatsConfig(url=server.url))

    return made


async def copied(outcomes: AsyncIterator[ArchiveOutcome], last_seq: int) -> int:
    """How many entries are copied, at once or one after the other, until the archive ends with that one."""
    count = 0
    async for outcome in outcomes:
        assert outcome == ArchiveOutcome(last_seq=outcome.last_seq, copied=outcome.copied), outcome
        count += outcome.copied
        if outcome.last_seq == last_seq:
            break
    return count


async def test_archive_process_follows_log_until_head_ends_it(
    nats_server: EmbeddedServer,
    nats_connection: Connection,
    where: Callable[..., Config],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unicrond.service.event_log.retention.STOP_S", 60.0)
    config = where(nats_server)
    log = NatsEventLog(nats_connection)
    cluster = troubled(1)
    await fill(log, cluster.log)
    count = len(cluster.log)
    trims: asyncio.Queue[TrimOrder] = asyncio.Queue()
    async with asyncio.timeout(60), aclosing(follow_apart(config, trims)) as outcomes:
        assert await anext(outcomes) == ArchiveOutcome(0)
        assert await copied(outcomes, count) == count
        assert (await archive(nats_connection, config.archive)) == (count, 0, 0), "it waits for who follows"
        await log.append([replace(cluster.log[-1].envelope, number=10_000)])
        assert await copied(outcomes, count + 1) == 1
        trims.put_nowait(TrimOrder(7200.0))
        assert await anext(outcomes) == ArchiveOutcome(is_trim=True)
        await log.append([replace(cluster.log[-1].envelope, number=10_001)])
        async with aclosing(log.read(count + 1)) as entries:
            await anext(entries)
    assert "it is killed" not in caplog.text, "it ends by itself"
    newest = newest_archived(config.archive)
    assert newest is not None and newest.seq in (count + 1, count + 2)
    assert (await archive(nats_connection, config.archive)).last_seq == count + 2, "the lock is free"


async def test_archive_process_reports_failure_and_goes_on(
    nats_server: EmbeddedServer, nats_connection: Connection, where: Callable[..., Config]
) -> None:
    config = where(nats_server)
    without = replace(config, nats=NatsConfig())
    async with asyncio.timeout(60), aclosing(follow_apart(without, asyncio.Queue())) as outcomes:
        for _ in range(2):
            assert "no nats-server runs there" in (await anext(outcomes)).error
    async with asyncio.timeout(60), aclosing(follow_apart(config, asyncio.Queue())) as outcomes:
        assert (await anext(outcomes)).error == ""
        await api(nats_connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
        while "stream not found" not in (await anext(outcomes)).error:
            pass
        SegmentWriter(config.archive).close()  # the lock is free for who restores the log
        await create_streams(nats_connection)
        await fill(NatsEventLog(nats_connection), troubled(1).log[:3])
        while (await anext(outcomes)).last_seq != 3:
            pass
