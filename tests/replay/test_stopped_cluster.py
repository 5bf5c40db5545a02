"""A stopped cluster's directory is read without a server being started by hand, and stays as it is."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.replay.command import ROOT, unicron_replay
from tests.replay.logs import fill, troubled
from unicrond.events.archive.archive import archive, trim
from unicrond.events.log.event_log import LogError
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import PROGRAM, EmbeddedServer
from unicrond.events.nats.streams import NANOS, api, create_streams, event_stream_config
from unicrond.replay.reading import stopped_cluster
from unicrond.replay.reading.stopped_cluster import serve_copy


def content(directory: Path) -> dict[str, tuple[str, int]]:
    """Every file: its digest, and when it was written."""
    return {
        str(path.relative_to(directory)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file()
    }


async def _make(state_dir: Path) -> None:
    server = EmbeddedServer(state_dir / "nats")
    await server.start()
    connection = await connect(server.url, name="test", timeout_s=10)
    await create_streams(connection)
    await api(connection, f"STREAM.UPDATE.{EVENT_STREAM}", {**event_stream_config(), "duplicate_window": NANOS // 10})
    log, cluster = NatsEventLog(connection), troubled(3)
    half = len(cluster.log) // 2
    await fill(log, cluster.log[:half])
    filled_s = time.monotonic()
    await asyncio.sleep(3.0)
    cluster.take_over()
    await fill(log, cluster.log[half:])
    await archive(connection, state_dir / "archive")
    keep_s = time.monotonic() - filled_s - 0.1  # the pause's beginning: nearly all of it is a busy machine's
    assert await trim(connection, state_dir / "archive", keep_s, keep_least_s=0.0) == half
    await api(
        connection,
        f"CONSUMER.DURABLE.CREATE.{EVENT_STREAM}.agent-n1",
        {"stream_name": EVENT_STREAM, "config": {"durable_name": "agent-n1", "ack_policy": "explicit"}},
    )
    await connection.close()
    await server.kill()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state_dir = tmp_path_factory.mktemp("made") / "state"
    asyncio.run(_make(state_dir))
    return state_dir


@pytest.fixture
def stopped(made: Path, tmp_path: Path) -> Path:
    """A state directory whose server was killed; the log's first half is in the archive alone."""
    return Path(shutil.copytree(made, tmp_path / "state"))


def test_stopped_cluster_is_read_from_copy(stopped: Path, tmp_path: Path) -> None:
    before, place = content(stopped), tmp_path / "tmp"
    place.mkdir()
    done = unicron_replay("digest", "--state-dir", stopped, TMPDIR=str(place))
    assert done.returncode == 0, done.stderr
    of_file = unicron_replay("digest", "--log", stopped / "archive")
    assert done.stdout == of_file.stdout
    assert content(stopped) == before and not list(place.iterdir())
    shutil.rmtree(stopped / "nats")  # as a backup is
    done = unicron_replay("digest", "--state-dir", stopped)
    assert done.stdout == of_file.stdout


async def test_copy_server_admits_only_its_reader(stopped: Path) -> None:
    async with serve_copy(stopped) as (url, login):
        assert url.startswith("nats://127.0.0.1:")
        connection = await connect(url, name="test", login=login, timeout_s=5)
        info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
        assert info["state"]["consumer_count"] == 0 and info["state"]["messages"] > 10
        await connection.close()
        with pytest.raises(LogError):
            await connect(url, name="stranger", timeout_s=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_command_leaves_no_copy(stopped: Path, tmp_path: Path, number: signal.Signals) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    held = (
        "import asyncio, sys; from pathlib import Path\n"
        "from unicrond.replay.reading.stopped_cluster import serve_copy\n"
        "async def main():\n"
        "    async with serve_copy(Path(sys.argv[1])):\n"
        "        print('ready', flush=True)\n"
        "        sys.stdin.read()\n"
        "asyncio.run(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", held, str(stopped)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(place)},
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    (pid_file,) = place.glob(f"*/nats/{PROGRAM}.pid")
    server = int(pid_file.read_text())
    process.send_signal(number)
    code = process.wait(20)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    for _ in range(100):
        if not Path(f"/proc/{server}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{server}").exists()
    assert number == signal.SIGKILL or not list(place.iterdir())
    process.stdin.close()
    process.stdout.close()


async def test_server_started_meanwhile_is_used(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedServer(stopped / "nats")
    copy = stopped_cluster._copy

    async def copied(store: Path, to: Path) -> None:
        await copy(store, to)
        await server.start()

    monkeypatch.setattr(stopped_cluster, "_copy", copied)
    try:
        async with serve_copy(stopped) as (url, login):
            assert (url, login) == (server.url, None)
    finally:
        await server.kill()


async def test_copy_without_room_names_tmpdir(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(stopped)._replace(free=1000)
    monkeypatch.setattr(stopped_cluster.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(LogError, match="set TMPDIR to a larger volume"):
        async with serve_copy(stopped):
            pass
