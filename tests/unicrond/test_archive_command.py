"""`unicrond archive`, and a coordinator and a replay whose log begins in the archive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.replay.command import ROOT, unicron_replay
from tests.replay.logs import fill, troubled
from unicrond.core.state.policy import Policy
from unicrond.core.state.state_bytes import digest
from unicrond.events.archive.archive import archive, trim
from unicrond.events.archive.archived_log import ArchivedLog
from unicrond.events.log.event_log import LogDamaged
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import NANOS, api, create_streams, event_stream_config
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.surroundings import HeadSettings


def unicrond(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unicrond.commands.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )


async def trimmed(connection: Connection, directory: Path) -> NatsEventLog:
    """A log of two halves some seconds apart; the first is in the archive alone."""
    short = {**event_stream_config(), "duplicate_window": NANOS // 10}
    await api(connection, f"STREAM.UPDATE.{EVENT_STREAM}", short)
    log = NatsEventLog(connection)
    cluster = troubled(3)
    half = len(cluster.log) // 2
    await fill(log, cluster.log[:half])
    filled_s = time.monotonic()
    await asyncio.sleep(3.0)
    cluster.take_over()
    await fill(log, cluster.log[half:])
    await archive(connection, directory)
    keep_s = time.monotonic() - filled_s - 0.1  # the pause's beginning: nearly all of it is a busy machine's
    assert await trim(connection, directory, keep_s, keep_least_s=0.0) == half
    return log


async def caught_up(coordinator: Coordinator) -> str:
    running = asyncio.create_task(coordinator.run())
    try:
        await asyncio.wait_for(coordinator.live.wait(), 10)
        return digest(coordinator.state)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_coordinator_and_replay_read_archive_first(
    nats_server: EmbeddedServer, nats_connection: Connection, tmp_path: Path
) -> None:
    directory = tmp_path / "archive"
    log = await trimmed(nats_connection, directory)
    alone = Coordinator(log, NatsBeatLog(nats_connection), HeadSettings(policy=Policy(), heartbeat_s=30.0))
    with pytest.raises(LogDamaged, match="were trimmed and are in the archive"):
        await alone.run()
    coordinator = Coordinator(
        ArchivedLog(log, directory), NatsBeatLog(nats_connection), HeadSettings(policy=Policy(), heartbeat_s=30.0)
    )
    live = await caught_up(coordinator)
    ask = ("digest", "--nats", nats_server.url, "--at", coordinator.state.seq)
    done = await asyncio.to_thread(unicron_replay, *ask, "--archive", directory)
    assert done.stdout.split()[0] == live, done.stderr
    without = await asyncio.to_thread(unicron_replay, *ask)
    assert without.returncode == 1 and "were trimmed and are in the archive" in without.stderr


async def test_archive_command_archives_and_trims(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    config = tmp_path / "unicron.yaml"
    config.write_text(f"state_dir: {state_dir}\nauth: off\n")
    done = await asyncio.to_thread(unicrond, "archive", "--config", config)
    assert done.returncode == 1 and "no nats-server runs there; start unicrond" in done.stderr
    server = EmbeddedServer(state_dir / "nats")
    await server.start()
    try:
        connection = await connect(server.url, name="test", timeout_s=10)
        await create_streams(connection)
        cluster = troubled(1)
        await fill(NatsEventLog(connection), cluster.log)
        await connection.close()
        count = len(cluster.log)
        done = await asyncio.to_thread(unicrond, "archive", "--config", config)
        assert done.stdout == f"{state_dir}/archive: entries 1 to {count}, {count} of them new\n", done.stderr
        done = await asyncio.to_thread(unicrond, "archive", "--config", config, "--keep", "1h")
        assert done.stdout.endswith(f"entries 1 to {count}, 0 of them new; 0 removed from NATS\n"), done.stderr
        done = await asyncio.to_thread(unicron_replay, "digest", "--state-dir", state_dir)
        same = await asyncio.to_thread(unicron_replay, "digest", "--log", state_dir / "archive")
        assert done.stdout == same.stdout != "", done.stderr
        done = await asyncio.to_thread(unicrond, "archive", "--config", config, "--keep", "5 minutes")
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "like 12h or 30d" in done.stderr
    finally:
        await server.kill()
