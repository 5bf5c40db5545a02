"""Every source gives the same entries, and leaves its log as it was."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.contracts.file_log import FileLog
from tests.replay.logs import eventful, fill, troubled, write_log
from unicrond.core.replayer import replay
from unicrond.core.state.state_bytes import digest
from unicrond.events.log.event_log import LogDamaged, LogError, LogUnavailable
from unicrond.events.log.point import AtSeq, AtTime, Point
from unicrond.events.log.segments import batch_frame, end_frame, export_start, read_segment, segment_name, segment_start
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.replay.reading.export import Export
from unicrond.replay.reading.nats_source import open_nats
from unicrond.replay.reading.source import FileSource, Source, read
from unicrond.replay.reading.stopped_cluster import running_url


async def entries_of(source: Source, *, after: Point | None = None, until: Point | None = None) -> list[Entry]:
    async with aclosing(read(source, after=after, until=until)) as chunks:
        return [entry async for chunk in chunks for entry in chunk.entries]


async def test_export_reads_back_as_log(tmp_path: Path) -> None:
    entries = eventful(1)
    source = FileSource(write_log(tmp_path / "log.bin", entries))
    assert repr(await entries_of(source)) == repr(entries)  # by repr: a loss may be NaN
    assert await source.end_us() == entries[-1].recorded_at_us


@pytest.mark.parametrize("batch", [1, 7, 1000])
async def test_file_source_reads_range(tmp_path: Path, batch: int) -> None:
    entries = list(troubled(2).log)
    source = FileSource(write_log(tmp_path / "log.bin", list(entries), batch))
    for first, last in [(0, 0), (0, 1), (3, 10), (7, 14), (50, len(entries)), (len(entries), len(entries))]:
        assert await entries_of(source, after=AtSeq(first), until=AtSeq(last)) == entries[first:last]
        if 0 < first < last:
            after, until = AtTime(entries[first - 1].recorded_at_us), AtTime(entries[last - 1].recorded_at_us)
            assert await entries_of(source, after=after, until=until) == entries[first:last]


async def test_time_split_covers_log_without_overlap(tmp_path: Path) -> None:
    entries = eventful(3)  # its last entry was recorded before the one before it
    source = FileSource(write_log(tmp_path / "log.bin", entries, 10))
    for entry in entries[::20] + entries[-4:]:
        point = AtTime(entry.recorded_at_us)
        parts = await entries_of(source, until=point) + await entries_of(source, after=point)
        assert repr(parts) == repr(entries)


async def test_file_log_and_its_export_have_same_digest(tmp_path: Path) -> None:
    cluster = troubled(4)
    log = FileLog(tmp_path / "live", segment_bytes=10_000)
    await fill(log, cluster.log)
    with Export(tmp_path / "exported") as export:
        export.write([entry async for entry in log.read(until_seq=await log.last_seq())])
    await log.close()
    assert len(list((tmp_path / "live").glob("*.log"))) > 2
    live = await entries_of(FileSource(tmp_path / "live"))
    assert digest(replay(live)) == digest(replay(await entries_of(FileSource(tmp_path / "exported"))))
    assert [entry.envelope for entry in live if isinstance(entry, RecordedEvent)] == [e.envelope for e in cluster.log]
    assert await FileSource(tmp_path / "live").end_us() == live[-1].recorded_at_us


async def test_unfinished_write_is_dropped_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = troubled(5).log
    segment = tmp_path / "live" / segment_name(1)
    segment.parent.mkdir()
    segment.write_bytes((segment_start(1) + batch_frame(log[:10]) + batch_frame(log[10:20]))[:-5])
    assert len(await entries_of(FileSource(segment.parent))) == 10
    assert "never acknowledged and is left out" in caplog.text


async def test_truncated_export_is_refused_by_name(tmp_path: Path) -> None:
    entries = eventful(5)
    whole = write_log(tmp_path / "log.bin", entries, 10).read_bytes()
    marked = len(whole) - len(end_frame(len(entries), 0))
    ends = [batch.end_bytes for batch in read_segment(tmp_path / "log.bin")]
    assert ends[-1] == marked
    for cut in {*ends, marked + 1, len(whole) - 1, *range(100, len(whole), 997)}:
        path = tmp_path / "cut.bin"
        path.write_bytes(whole[:cut])
        with pytest.raises(LogDamaged, match=r"cut\.bin: cut short: .* export the log again"):
            await entries_of(FileSource(path), until=AtSeq(1))  # also where only its beginning is asked for
    zeros = whole[:marked] + bytes(len(whole) - marked)
    (tmp_path / "zeros.bin").write_bytes(zeros)
    with pytest.raises(LogDamaged, match=r"zeros\.bin: cut short"):
        await entries_of(FileSource(tmp_path / "zeros.bin"))


async def test_export_shorter_than_its_end_mark_is_refused(tmp_path: Path) -> None:
    log = troubled(1).log
    path = tmp_path / "log.bin"
    path.write_bytes(export_start() + batch_frame(log[:3]) + end_frame(4, 0))
    with pytest.raises(LogDamaged, match="its end mark says 4 entries and 0 heartbeats, it holds 3 and 0"):
        await entries_of(FileSource(path))


async def test_older_export_without_end_mark_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = troubled(1).log
    path = tmp_path / "old.bin"
    path.write_bytes(segment_start(1) + batch_frame(log[:3]))
    assert await entries_of(FileSource(path)) == list(log[:3])
    assert "old.bin has no end mark" in caplog.text and "may have been cut" in caplog.text


async def test_damaged_export_is_refused(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.bin", eventful(5), 10)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogDamaged, match=r"log\.bin"):
        await entries_of(FileSource(path))


async def test_gap_between_batches_counts_as_damage(tmp_path: Path) -> None:
    log = troubled(1).log
    path = tmp_path / "log.bin"
    path.write_bytes(segment_start(1) + batch_frame(log[:3]) + batch_frame(log[4:6]))
    with pytest.raises(LogDamaged, match="entry 5 follows entry 3"):
        await entries_of(FileSource(path))


async def test_empty_file_is_no_log_and_empty_export_is(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(LogDamaged):
        await entries_of(FileSource(tmp_path / "empty"))
    source = FileSource(write_log(tmp_path / "export.bin", []))
    assert await entries_of(source) == []
    assert await source.end_us() == 0


def test_failed_export_keeps_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "log.bin"
    path.write_bytes(b"older")
    log = list(troubled(1).log)
    with pytest.raises(LogDamaged, match="entry 5 follows entry 3"), Export(path) as export:
        export.write(log[:3])
        export.write(log[4:])
    assert path.read_bytes() == b"older"
    assert [each.name for each in tmp_path.iterdir()] == ["log.bin"]


async def test_nats_and_its_export_have_same_digest(
    nats_server: EmbeddedServer, nats_connection: Connection, tmp_path: Path
) -> None:
    cluster = troubled(6)
    await fill(NatsEventLog(nats_connection), cluster.log)
    session = await nats_connection.session()
    await session.request("unicron.v1.obs.n1.Nonsense", b"no event")
    before = await api(nats_connection, f"STREAM.INFO.{EVENT_STREAM}", {})

    async with open_nats([nats_server.url]) as source:
        entries = await entries_of(source)
        assert await source.end_us() == entries[-1].recorded_at_us
        some = await entries_of(source, after=AtSeq(10), until=AtSeq(20))
        assert await entries_of(source, after=AtSeq(len(entries))) == []
    assert some == entries[10:20]
    assert len(entries) == len(cluster.log) + 1
    state = replay(entries)
    assert state.quarantined_messages == 1
    exported = FileSource(write_log(tmp_path / "log.bin", entries))
    assert digest(replay(await entries_of(exported))) == digest(state)

    after = await api(nats_connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    for info in (before, after):
        info.pop("ts")
        info["state"].pop("consumer_count")
    assert after == before
    consumers = await api(nats_connection, f"CONSUMER.LIST.{EVENT_STREAM}", {})
    assert not [c for c in consumers["consumers"] or [] if c["config"].get("durable_name")]


async def test_nats_source_excludes_later_appends(nats_server: EmbeddedServer, nats_connection: Connection) -> None:
    cluster = troubled(7)
    log = NatsEventLog(nats_connection)
    await fill(log, cluster.log[:50])
    async with open_nats([nats_server.url]) as source:
        await fill(log, cluster.log[50:60])
        assert len(await entries_of(source)) == 50


async def test_empty_stream_reads_as_empty_log(nats_server: EmbeddedServer, nats_connection: Connection) -> None:
    async with open_nats([nats_server.url]) as source:
        assert await entries_of(source) == []
        assert await source.end_us() == 0


async def test_nats_source_names_missing_stream_and_creates_none(nats_server: EmbeddedServer) -> None:
    with pytest.raises(LogError, match=f"no stream {EVENT_STREAM} there"):
        async with open_nats([nats_server.url]):
            pass
    reader, writer = await asyncio.open_connection("127.0.0.1", nats_server.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false}\r\nSUB inbox 1\r\nPUB $JS.API.STREAM.NAMES inbox 0\r\n\r\n')
    assert (await reader.readline()).startswith(b"MSG inbox")
    assert not json.loads(await reader.readline()).get("streams")
    writer.close()
    await writer.wait_closed()


async def test_nats_source_fails_when_server_dies(
    nats_server: EmbeddedServer, nats_connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = troubled(8)
    await fill(NatsEventLog(nats_connection), cluster.log[:30])
    async with open_nats([nats_server.url]) as source:
        monkeypatch.setattr("unicrond.replay.reading.nats_source.STALL_S", 0.5)
        await nats_server.kill()
        with pytest.raises(LogUnavailable, match=r"no answer about the skipped entries in 0\.5 s"):
            await entries_of(source)
        with pytest.raises(LogUnavailable, match="nothing after entry 0 of 30"):
            await anext(source.chunks())
        with pytest.raises(LogUnavailable, match="no answer about the heartbeats"):
            await anext(source.beats())


async def test_embedded_server_of_state_directory_is_found(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    assert await running_url(tmp_path) is None
    await server.start()
    try:
        assert await running_url(tmp_path) == server.url
    finally:
        await server.kill()
