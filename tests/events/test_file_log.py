"""The log in files: it survives every torn write, refuses damage, and exports any log."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.contracts.file_log import FileLog
from tests.contracts.logs import command, fact, facts, history, started
from unicrond.events.log.event_log import Fence, Fenced, LogDamaged, LogError, LogUnavailable
from unicrond.events.log.segment_writer import SegmentWriter
from unicrond.events.log.segments import TornTail, read_entries, read_segment, segment_paths
from unicrond.events.wire.envelope import QuarantinedMessage, RecordedEvent


async def written(directory: Path, **options: int) -> list[Path]:
    """A log of 30 facts in batches of 1, 2, 3, 4, ..; its segments."""
    log = FileLog(directory, **options)
    first = 1
    for size in (1, 2, 3, 4, 5, 6, 9):
        await log.append(facts(first, first + size - 1))
        first += size
    await log.close()
    return segment_paths(directory)


async def test_file_log_reopens_with_its_state(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    await log.append(facts(1, 3))
    fence = await log.claim_term(started(3))
    before = await history(log)
    await log.close()
    log = FileLog(tmp_path)
    assert await history(log) == before
    assert await log.append([fact(2), fact(4)]) == [2, 5]
    assert await log.append([command(1, term=3)], fence=fence) == [6]
    with pytest.raises(Fenced):
        await log.append([command(2, term=3)], fence=Fence(2, 1))
    with pytest.raises(Fenced):
        await log.claim_term(started(3, "other"))
    await log.close()


async def test_file_log_rolls_segments_and_reads_across(tmp_path: Path) -> None:
    log = FileLog(tmp_path, segment_bytes=400)
    reading = asyncio.create_task(_collect(log, 50))
    for number in range(1, 51):
        assert await log.append([fact(number)]) == [number]
        if number % 10 == 0:
            await asyncio.sleep(0)
    assert await asyncio.wait_for(reading, 10) == list(range(1, 51))
    await log.close()
    assert len(segment_paths(tmp_path)) > 10
    assert [entry.seq for entry in read_entries(tmp_path)] == list(range(1, 51))
    log = FileLog(tmp_path, segment_bytes=400)
    assert [entry.seq for entry in await history(log, 33)] == list(range(34, 51))
    await log.close()


async def test_file_log_reader_follows_growing_file(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    await log.append(facts(1, 3))
    reading = log.read()
    assert [(await anext(reading)).seq for _ in range(2)] == [1, 2]
    await log.append(facts(4, 6))
    assert [(await anext(reading)).seq for _ in range(4)] == [3, 4, 5, 6]
    await reading.aclose()
    await log.close()


async def test_file_log_truncates_torn_tail(tmp_path: Path) -> None:
    """Cut the file anywhere: what is left is a whole number of batches, and the log goes on."""
    [segment] = await written(tmp_path / "whole")
    data = segment.read_bytes()
    ends = {batch.end_bytes: batch.entries[-1].seq for batch in read_segment(segment)}
    assert max(ends) == len(data)
    around = {end + by for end in ends for by in (-1, 0, 1, 5, 12, 13)}
    for size in sorted({*range(0, 70, 3), *range(70, len(data), 61), *around}):
        if size >= len(data):
            continue
        directory = tmp_path / str(size)
        directory.mkdir()
        (directory / segment.name).write_bytes(data[:size])
        log = FileLog(directory)
        whole = max((seq for end, seq in ends.items() if end <= size), default=0)
        assert await log.last_seq() == whole
        assert await log.append([fact(99)]) == [whole + 1]
        assert len(await history(log)) == whole + 1
        await log.close()


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"\0" * 3])
async def test_trailing_zeros_count_as_torn_tail(tmp_path: Path, tail: bytes) -> None:
    [segment] = await written(tmp_path)
    with segment.open("ab") as file:
        file.write(tail)
    with pytest.raises(TornTail):
        list(read_entries(tmp_path))
    log = FileLog(tmp_path)
    assert await log.last_seq() == 30
    await log.close()
    assert [entry.seq for entry in read_entries(tmp_path)] == list(range(1, 31))


async def test_file_log_refuses_damage(tmp_path: Path) -> None:
    """Flip a byte anywhere before the last frame: the log refuses, and the file stays as it is."""
    [segment] = await written(tmp_path)
    data = segment.read_bytes()
    last_begins = sorted(batch.end_bytes for batch in read_segment(segment))[-2]
    draw = random.Random(7)
    for at in [*range(40), *draw.sample(range(40, last_begins), 80)]:
        broken = bytearray(data)
        broken[at] ^= 1 << draw.randrange(8)
        segment.write_bytes(broken)
        with pytest.raises(LogDamaged):
            FileLog(tmp_path)
        assert segment.read_bytes() == broken
        with pytest.raises(LogDamaged):
            list(read_entries(tmp_path))


async def test_missing_segment_counts_as_damage(tmp_path: Path) -> None:
    segments = await written(tmp_path, segment_bytes=700)
    assert len(segments) >= 3
    segments[1].unlink()
    with pytest.raises(LogDamaged, match=r"entry \d+ follows entry \d+"):
        FileLog(tmp_path)
    with pytest.raises(LogDamaged, match=r"entry \d+ follows entry \d+"):
        list(read_entries(tmp_path))


def test_file_log_names_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(LogDamaged, match="holds no segment"):
        list(read_entries(tmp_path))
    (tmp_path / "notes.txt").write_text("Dear diary")
    with pytest.raises(LogDamaged, match="not an event log"):
        list(read_entries(tmp_path / "notes.txt"))


async def test_file_log_allows_one_writer(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    with pytest.raises(LogError, match="another process"):
        FileLog(tmp_path)
    await log.close()
    await FileLog(tmp_path).close()


async def test_full_disk_loses_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FileLog(tmp_path)
    await log.append(facts(1, 3))
    real = os.write

    def half(file: int, data: memoryview) -> int:
        if len(data) > 10:
            return real(file, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(LogUnavailable, match="No space left"):
            await log.append(facts(4, 5))
    assert await log.last_seq() == 3
    assert await log.append(facts(4, 5)) == [4, 5]
    await log.close()
    assert [entry.seq for entry in read_entries(tmp_path)] == [1, 2, 3, 4, 5]


async def test_failed_first_batch_leaves_no_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FileLog(tmp_path, segment_bytes=300)
    await log.append([fact(1)])
    real, calls = os.fsync, []

    def fail_third(file: int) -> None:
        calls.append(file)
        if len(calls) == 4:  # the new segment, its directory, the old segment, then the batch
            raise OSError(5, "Input/output error")
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_third)
        with pytest.raises(LogUnavailable):
            await log.append(facts(2, 3))
    assert await log.append(facts(2, 3)) == [2, 3]
    assert log._writer.segments == segment_paths(tmp_path)
    assert [entry.seq for entry in await history(log)] == [1, 2, 3]
    await log.close()
    assert [entry.seq for entry in read_entries(tmp_path)] == [1, 2, 3]


def test_segment_writer_ignores_ids(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.write([RecordedEvent(1, 5, fact(1)), QuarantinedMessage(2, 6, "s", "r", 3)])
    writer.close()
    writer.close()
    assert list(read_entries(tmp_path)) == [RecordedEvent(1, 5, fact(1)), QuarantinedMessage(2, 6, "s", "r", 3)]


async def _collect(log: FileLog, until_seq: int) -> list[int]:
    return [entry.seq async for entry in log.read(until_seq=until_seq)]
