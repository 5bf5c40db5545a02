"""What is imported is the log again: in files with its digests, on a server with its numbers and producers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.replay.command import unicron_replay
from tests.replay.logs import eventful, write_log
from unicrond.core.replayer import replay
from unicrond.core.state.state_bytes import digest
from unicrond.events.log.event_log import LogError
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.wire.envelope import Entry, QuarantinedMessage, RecordedEvent
from unicrond.replay.reading.importing import NotEmpty, import_to_directory, import_to_nats
from unicrond.replay.reading.nats_source import open_nats
from unicrond.replay.reading.source import FileSource, entries_of


async def read_all(source: FileSource) -> list[Entry]:
    return [entry async for entry in entries_of(source)]


async def test_import_into_files_keeps_everything(tmp_path: Path) -> None:
    entries = eventful(3)
    source = FileSource(write_log(tmp_path / "log.bin", entries))
    assert await import_to_directory(source.chunks(), tmp_path / "copy", source.beats()) == len(entries)
    copy = await read_all(FileSource(tmp_path / "copy"))
    assert repr(copy) == repr(entries)
    assert digest(replay(copy)) == digest(replay(entries))


async def test_import_refuses_nonempty_directory(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "note").touch()
    source = FileSource(write_log(tmp_path / "log.bin", eventful(3)))
    with pytest.raises(NotEmpty, match="is not empty; import into a new directory"):
        await import_to_directory(source.chunks(), tmp_path / "copy", source.beats())
    assert [each.name for each in (tmp_path / "copy").iterdir()] == ["note"]


async def test_import_into_server_keeps_numbers_and_producers(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    entries = eventful(4)
    source = FileSource(write_log(tmp_path / "log.bin", entries))
    connection = await connect(nats_server.url, name="test", timeout_s=10)
    try:
        assert await import_to_nats(source.chunks(), connection) == len(entries)
    finally:
        await connection.close()
    async with open_nats([nats_server.url]) as stored:
        copy = [entry async for entry in entries_of(stored)]
    for old, new in zip(entries, copy, strict=True):
        assert old.seq == new.seq
        if isinstance(old, QuarantinedMessage):
            assert isinstance(new, QuarantinedMessage) and new.size_bytes == old.size_bytes
        else:
            assert isinstance(new, RecordedEvent) and repr(new.envelope) == repr(old.envelope)
            assert new.recorded_at_us > old.recorded_at_us
    was, now = replay(entries), replay(copy)
    assert (now.seq, now.duplicates, now.inert, now.quarantined_messages) == (
        was.seq,
        was.duplicates,
        was.inert,
        was.quarantined_messages,
    )
    assert {name: task.progress.iteration for name, task in now.tasks.items()} == {
        name: task.progress.iteration for name, task in was.tasks.items()
    }


async def test_import_refuses_server_with_streams(nats_connection: Connection, tmp_path: Path) -> None:
    source = FileSource(write_log(tmp_path / "log.bin", eventful(4)))
    with pytest.raises(NotEmpty, match="a cluster may live there; import into a nats-server of its own"):
        await import_to_nats(source.chunks(), nats_connection)


def test_failed_import_leaves_nothing(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.bin", eventful(4), 50)
    broken = bytearray(log.read_bytes())
    broken[len(broken) // 2] ^= 1
    (tmp_path / "broken.bin").write_bytes(broken)
    done = unicron_replay("import", tmp_path / "broken.bin", "--into", tmp_path / "there")
    assert done.returncode == 1 and [path.name for path in (tmp_path / "there").iterdir()] == ["lock"]
    done = unicron_replay("import", log, "--into", tmp_path / "there")
    assert (done.returncode, done.stderr) == (0, "")


async def test_imported_log_accepts_no_coordinator(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.bin", eventful(4))
    done = await asyncio.to_thread(unicron_replay, "import", log, "--nats", nats_server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the recorded times are those of the import" in done.stdout
    connection = await connect(nats_server.url, name="test", timeout_s=10)
    try:
        with pytest.raises(LogError, match="was imported, for replay only"):
            await create_streams(connection)
    finally:
        await connection.close()
    verified = await asyncio.to_thread(unicron_replay, "verify", "--nats", nats_server.url)
    assert verified.returncode == 2 and "its times are those of the import; verify the file" in verified.stderr
    again = await asyncio.to_thread(unicron_replay, "import", log, "--nats", nats_server.url)
    assert again.returncode == 1 and again.stderr.count("\n") == 1 and "already" in again.stderr
