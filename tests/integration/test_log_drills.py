"""Drills of the log under a cluster that trains: its volume gets full; it is deleted, and its archive is behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.live import TASK, live_cluster, seats
from tests.integration.test_deleted_log import deleted
from tests.integration.test_known_log import says
from tests.integration.test_log_life import unicrond

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400)]


def test_cluster_trains_on_while_volume_of_head_is_full(tmp_path: Path) -> None:
    flags = "-m" if os.geteuid() == 0 else "-rm"
    if subprocess.run(["unshare", flags, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    command = ["unshare", flags, sys.executable, "-m", "tests.integration.full_volume", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr


async def test_log_is_restored_from_an_archive_that_is_behind(tmp_path: Path) -> None:
    """As from another head's: what it lacks is lost, the command says so, and the task goes on by a person's order."""
    async with live_cluster(tmp_path, nodes=2, workers=2, keys=True) as live:
        await live.submit(checkpoint={"interval": 20, "dir": str(tmp_path / "checkpoints")})
        before = await live.training(0, beyond=60)
        state_dir, head = live.dev.state_dir, live.dev.coordinator
        shutil.copytree(state_dir / "archive", tmp_path / "older")
        os.kill(next(iter(seats(before).values()))[1], signal.SIGKILL)
        last = await live.training(1, beyond=60)
        entries = len(await deleted(state_dir))
        await says(live.dev.url, "NATS has no event log, and this head has read one of")
        await head.stop()
        shutil.rmtree(state_dir / "archive")
        (tmp_path / "older").rename(state_dir / "archive")
        done = await asyncio.to_thread(unicrond, "restore", "--config", live.dev.config_path, "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert 0 < report["last_seq"] < entries and report["gap"] == entries - report["last_seq"], report
        assert report["remark"].startswith("the event log ends at entry"), report
        start_s = time.monotonic()
        head.command.append("--new-log")
        await head.start()
        await live.until("the nodes are back", lambda state: len(state.nodes) == 2 and state.term > before.term)
        head.command.remove("--new-log")
        after = await live.training(None, beyond=20)
        saved = last.tasks[TASK].progress.iteration // 20 * 20 - 20
        assert after.tasks[TASK].progress.iteration > saved, "from its newest checkpoint"
        print(f"{report['gap']} entries lost; trains on after {time.monotonic() - start_s:.1f} s")
