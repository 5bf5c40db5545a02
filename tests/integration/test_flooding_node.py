"""A node with a key of its own floods the log: its login ends, another's fault heals, and a person lets it in again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.flooder import ACKNOWLEDGEMENTS, CALLS
from tests.integration.head import UNICROND
from tests.integration.live import Live, live_cluster, seats

NODE = "flooder"


async def enrol(live: Live, key: Path) -> None:
    arguments = (UNICROND, "enroll", NODE, "--out", str(key), "--config", str(live.dev.config_path))
    assert await asyncio.wait_for((await asyncio.create_subprocess_exec(*arguments)).wait(), 30) == 0


async def flooder(live: Live, key: Path, size_bytes: int = 300) -> asyncio.subprocess.Process:
    url = f"nats://127.0.0.1:{live.dev.nats_port}"
    arguments = ("-m", "tests.integration.flooder", url, str(key), NODE, "60", str(size_bytes))
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)


@pytest.mark.timeout(600)
async def test_login_of_flooding_node_ends(tmp_path: Path) -> None:
    async with live_cluster(tmp_path, nodes=2, workers=2, keys=True) as live:
        await live.submit(iterations=10**12, min_workers=2)
        before = await live.training(0)
        key = tmp_path / "flooder.key"
        await enrol(live, key)
        flood = await flooder(live, key)
        await live.until("the flooder has joined", lambda s: NODE in s.nodes)
        victim, (_, pid) = next(iter(seats(before).items()))
        os.kill(pid, signal.SIGKILL)
        await live.until("its login has ended", lambda s: NODE not in s.logins)
        sent = json.loads((await asyncio.wait_for(flood.communicate(), 60))[0])
        assert sent["duration_s"] < 50, "the server has ended the connection"
        (revoked,) = live.events("NodeRevoked")
        assert revoked["node"] == NODE and "it floods the log" in revoked["reason"]
        alarms = await live.run("unicronctl", "--url", live.dev.url, "alarms")
        assert f"node-floods:{NODE}" in alarms and f"unicrond enroll {NODE}" in alarms, alarms
        healed = await live.until("the worker is replaced", lambda s: victim not in seats(s) and len(seats(s)) == 2)
        assert healed.nodes.keys() == {*before.nodes, NODE}
        for size_bytes in (700_000, CALLS, ACKNOWLEDGEMENTS):
            key.unlink()
            await enrol(live, key)
            await live.until("it may log in", lambda s: NODE in s.logins)
            again = await flooder(live, key, size_bytes)
            await live.until("its login has ended again", lambda s: NODE not in s.logins)
            sent = json.loads((await asyncio.wait_for(again.communicate(), 60))[0])
            assert sent["duration_s"] < 50, "the server has ended the connection"
            alarms = await live.run("unicronctl", "--url", live.dev.url, "alarms")
            assert f"node-floods:{NODE}" in alarms
        assert len(live.events("NodeRevoked")) == 4
