"""A head that has nothing to write sees all the same that the log takes nothing: `unicrond run` and an agent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents.test_daemon import AgentProcess
from tests.integration.test_daemon import config, daemon, get
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, connect
from unicrond.events.nats.streams import api, event_stream_config

UNICRONCTL = str(Path(sys.executable).parent / "unicronctl")


async def said(url: str, *command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        UNICRONCTL, *command, "--url", url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    return (await process.communicate())[0].decode()


async def health(url: str, wanted: Callable[[dict[str, object]], object]) -> dict[str, object]:
    """Once it is as wanted."""
    async with asyncio.timeout(60):
        while not wanted(found := await asyncio.to_thread(get, f"{url}/healthz")):  # noqa: ASYNC110 - it offers no event
            await asyncio.sleep(0.1)
    return found


async def edit(connection: Connection, **changes: object) -> None:
    await api(connection, f"STREAM.UPDATE.{EVENT_STREAM}", {**event_stream_config(), **changes})


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("n1")


async def test_idle_head_reports_blocked_log(tmp_path: Path, run_dir: Path) -> None:
    path = config(tmp_path)
    async with daemon(path) as (_, url):
        nats = f"nats://127.0.0.1:{path.read_text().split('nats: {port: ')[1].split('}')[0]}"
        connection = await connect([nats], name="test", timeout_s=10)
        agent = AgentProcess(nats, run_dir)
        try:
            await health(url, lambda found: int(str(found["seq"])) >= 2)  # the node has joined
            assert "unicron_log_takes_appends 1.0" in await asyncio.to_thread(metrics, url)

            await edit(connection, max_msgs=1)
            found = await health(url, lambda found: found["trouble"])
            assert found["status"] == "log takes nothing" and "--max-msgs=-1" in str(found["trouble"])
            os.kill(agent.fork_server(), signal.SIGKILL)  # the agent has something to say: it joins anew
            found = await health(url, lambda found: "node n1 holds back" in str(found["alarms"]))
            assert "n1" in found["outbox_backlog"]  # type: ignore[operator]
            assert "TROUBLE" in await said(url, "status") and "holds back" in await said(url, "nodes")
            shown = await asyncio.to_thread(metrics, url)
            assert "unicron_log_takes_appends 0.0" in shown and 'unicron_outbox_backlog{node="n1"}' in shown

            await edit(connection)
            found = await health(url, lambda found: not found["trouble"] and not found["outbox_backlog"])
            assert found["status"] == "live" and [row["alarm"] for row in found["alarms"]] == ["auth-off"]  # type: ignore[attr-defined]

            await api(connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
            found = await health(url, lambda found: found["trouble"])
            assert "event log" in str(found["trouble"])
        finally:
            agent.end()
            await connection.close()
