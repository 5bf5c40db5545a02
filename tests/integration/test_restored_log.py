"""The log is deleted under a cluster that trains, and restored whole: head, agents and workers go on by themselves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests import nats_snapshots
from tests.integration.live import TASK, Live, live_cluster, members
from unicrond.core.state.state import ClusterState
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.streams import api
from unicrond.events.trust.logins import Role

pytestmark = pytest.mark.timeout(600)

#: The log goes on within so much after the restore; 5 s without other work on the machine.
GOES_ON_S = 15.0
AWAY_S = 3.0


@asynccontextmanager
async def login(live: Live, role: Role) -> AsyncIterator[Connection]:
    key = live.dev.state_dir / "keys" / f"{role}.key"
    connection = await connect(live.dev.nats_url, name="somebody", login=Login(key=key), timeout_s=10)
    try:
        yield connection
    finally:
        await connection.close()


async def end_seq(connection: Connection) -> int:
    return int((await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["state"]["last_seq"])


def hold_agents(live: Live, signum: signal.Signals) -> None:
    """Nothing is said while they are stopped: a backup holds all that was ever acknowledged."""
    for agent in live.dev.agents.values():
        assert agent.process is not None
        os.kill(agent.process.pid, signum)


def workers_of(live: Live, state: ClusterState) -> dict[str, psutil.Process]:
    return {name: psutil.Process(state.tasks[TASK].workers[name].pid) for name in members(state)}


async def restore_by_nats(live: Live) -> int:
    """`nats stream backup`, `stream rm`, `stream restore`; the number of entries."""
    async with login(live, Role.OPERATOR) as operator, login(live, Role.COORDINATOR) as coordinator:
        hold_agents(live, signal.SIGSTOP)
        saved = await nats_snapshots.backup(operator, EVENT_STREAM)
        await api(operator, f"STREAM.DELETE.{EVENT_STREAM}", {})
        hold_agents(live, signal.SIGCONT)
        await asyncio.sleep(AWAY_S)
        await nats_snapshots.restore(coordinator, saved)
        return int(saved.state["last_seq"])


async def restore_by_archive(live: Live) -> int:
    """`nats stream rm` in mid-training, with nothing held back, then `unicrond restore`; the number of entries."""
    async with login(live, Role.OPERATOR) as operator:
        end = await end_seq(operator)
        await api(operator, f"STREAM.DELETE.{EVENT_STREAM}", {})
    output = await live.run("unicrond", "restore", "--json", "--config", str(live.dev.config_path))
    report = json.loads(output.splitlines()[-1])
    assert report["last_seq"] >= end and not report["gap"] and not report["remark"], report
    print(f"entries lost: {end - report['last_seq']}, of those folded: {report['gap']}")
    return int(report["last_seq"])


@pytest.mark.parametrize(("restore", "heartbeat_s"), [(restore_by_nats, 1.0), (restore_by_archive, 5.0)])
async def test_cluster_goes_on_after_complete_restore(tmp_path: Path, restore, heartbeat_s: float) -> None:  # type: ignore[no-untyped-def]
    async with live_cluster(tmp_path, nodes=2, workers=2, heartbeat_s=heartbeat_s, keys=True) as live:
        await live.submit()
        before = await live.training(0)
        processes = workers_of(live, before)
        head = live.dev.coordinator.process
        end = await restore(live)
        begin_us = time.time_ns() // 1000
        after = await live.until("the log goes on", lambda state: state.seq > end)
        goes_on_s = (next(iter(live.client.events(end))).recorded_at_us - begin_us) / 1e6
        at = after.tasks[TASK].progress.iteration
        after = await live.until("it trains on", lambda state: state.tasks[TASK].progress.iteration > at + 10)
        assert {name: process.is_running() for name, process in processes.items()} == dict.fromkeys(processes, True)
        assert members(after) == members(before) and after.term == before.term
        assert after.tasks[TASK].generation == before.tasks[TASK].generation and not after.closed_incidents
        assert live.dev.coordinator.process is head and head is not None and head.returncode is None

        killed_s = time.monotonic()
        next(iter(processes.values())).kill()
        await live.until("it is decided", lambda state: state.tasks[TASK].generation > before.tasks[TASK].generation)
        decided_s = time.monotonic() - killed_s
        await live.training(1, beyond=3)
        healed_s = time.monotonic() - killed_s
        print(
            f"goes on {goes_on_s:.2f} s after the restore; the next fault decided in {decided_s:.2f} s, healed in "
            f"{healed_s:.1f} s"
        )
        assert goes_on_s < GOES_ON_S
