"""The timer that archives and trims: when it does what, what it counts, and what a person is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.replay.logs import fill, troubled
from unicrond.events.archive.archive import archive
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.intake.config import Config, LogConfig, NatsConfig
from unicrond.service.event_log.archive_command import ArchiveOutcome, ArchiveRequest
from unicrond.service.event_log.retention import LogLife, archive_apart
from unicrond.service.event_log.statistics import GIB, AppendTimes, Figures, LogVolume, Stream, alarms

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


def life(
    config: Config, outcomes: list[ArchiveOutcome], oldest_d: float = 3, leader: Leader | None = None
) -> tuple[LogLife, list[ArchiveRequest], Leader]:
    asked: list[ArchiveRequest] = []
    leader = leader or Leader()

    async def work(what: ArchiveRequest) -> ArchiveOutcome:
        asked.append(what)
        return outcomes[min(len(asked), len(outcomes)) - 1]

    found = LogLife(config, leader, lambda: info(oldest_d), AppendTimes(lambda: 0.0), lambda: 0.0, work)
    return found, asked, leader


def keeping(days: float, **more: Any) -> Config:
    return Config(log=LogConfig(keep_d=days, **more))


async def test_archiver_trims_only_old_enough_entries() -> None:
    for oldest_d, keep_s in ((3, None), (10, None), (12, 10 * DAY_S)):
        one, asked, _ = life(keeping(10), [ArchiveOutcome(last_seq=15, copied=2, beats=3, removed=4)], oldest_d)
        await one.archive_once()
        assert [what.keep_s for what in asked] == [keep_s]
    figures = one.figures
    assert (figures.archived_seq, figures.archived_beats, figures.removed, figures.failures) == (15, 3, 4, 0)


async def test_archiver_renews_old_term_without_alarm() -> None:
    too_old = ArchiveOutcome(last_seq=15, trim_error="the coordinator's term began with entry 3", term_too_old=True)
    one, asked, leader = life(keeping(10), [too_old, ArchiveOutcome(last_seq=16, removed=9)], 12)
    await one.archive_once()
    assert leader.renewed == 1 and one.alarms() == []
    await one.archive_once()
    assert leader.renewed == 1 and one.figures.removed == 9 and len(asked) == 2


async def test_archiver_failure_raises_alarm_until_success() -> None:
    one, _, _ = life(
        keeping(10),
        [ArchiveOutcome(error="no server"), ArchiveOutcome(last_seq=1, trim_error="no"), ArchiveOutcome(1)],
        12,
    )
    await one.archive_once()
    assert one.alarms() == ["the log is not archived: no server"]
    await one.archive_once()
    assert one.alarms() == ["older entries are not removed from NATS: no"]
    await one.archive_once()
    assert one.alarms() == [] and one.figures.failures == 2


async def test_standby_head_archives_nothing() -> None:
    leader = Leader(leads=False)
    one, asked, _ = life(keeping(10, archive_every_s=0.01), [ArchiveOutcome(last_seq=1)], leader=leader)
    running = asyncio.create_task(one.run())
    await asyncio.sleep(0.1)
    assert not asked
    leader.live.set()
    await asyncio.sleep(0.2)
    assert len(asked) > 1
    leader.live.clear()
    await asyncio.sleep(0.05)
    before = len(asked)
    await asyncio.sleep(0.1)
    assert len(asked) == before
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_retention_follows_configuration() -> None:
    elsewhere = NatsConfig(url="nats://elsewhere:4222")
    assert Config().keep_s == 30 * DAY_S
    assert keeping(7).keep_s == 7 * DAY_S
    assert Config(nats=elsewhere).keep_s is None  # each head has an archive of its own
    assert Config(nats=elsewhere, log=LogConfig(archive_dir="/shared")).keep_s == 30 * DAY_S
    assert Config(nats=elsewhere, log=LogConfig(keep_d=7)).keep_s == 7 * DAY_S
    assert Config(log=LogConfig(archive_every_s=0)).keep_s is None


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
        ({"archived_s": 901.0}, "the log is not archived: no success for 901 s"),
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


async def test_archive_process_archives_and_reports_failure(
    nats_server: EmbeddedServer, nats_connection: Connection, where: Callable[..., Config]
) -> None:
    config = where(nats_server)
    cluster = troubled(1)
    await fill(NatsEventLog(nats_connection), cluster.log)
    count = len(cluster.log)
    assert await archive_apart(ArchiveRequest(config, None)) == ArchiveOutcome(last_seq=count, copied=count)
    assert (await archive(nats_connection, config.archive)).copied == 0
    failed = await archive_apart(ArchiveRequest(replace(config, nats=NatsConfig()), 7200.0))
    assert failed.last_seq == 0 and "no nats-server runs there" in failed.error
