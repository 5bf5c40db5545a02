"""The life of a head's log, on the real daemon: archived by its timer, measured, backed up, lost, restored."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.integration.head import UNICROND, config, daemon, get
from tests.integration.live import TASK, live_cluster
from tests.replay.command import unicron_replay
from unicrond.events.log.event_log import LogError
from unicrond.intake.config import load
from unicrond.service.event_log.backup import back_up, restore


def unicrond(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([UNICROND, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def submit(url: str, name: str) -> None:
    body = json.dumps({"name": name}).encode()
    asked = urllib.request.Request(f"{url}/v1/tasks", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(asked, timeout=30).close()


def archived_seq(url: str) -> int:
    return dict(get(f"{url}/healthz"))["archive"]["seq"]


async def test_lost_head_is_restored_from_backup(tmp_path: Path) -> None:
    path = config(tmp_path)
    path.write_text(path.read_text().replace("port:", "auth: keys, port:", 1))
    state, backup = tmp_path / "state", tmp_path / "backup"
    async with daemon(path) as (_, url):
        await asyncio.to_thread(submit, url, "a")
        health = await asyncio.to_thread(get, f"{url}/healthz")
        await asyncio.to_thread(until, "it is archived", lambda: archived_seq(url) >= health["seq"])
        metrics = await asyncio.to_thread(text, f"{url}/metrics")
        assert "unicron_log_bytes " in metrics and 'unicron_disk_free_bytes{volume="state"}' in metrics
        assert "unicron_log_append_seconds_count" in metrics
        done = await asyncio.to_thread(unicrond, "backup", backup, "--config", path, "--json")
        assert done.returncode == 0, done.stderr
        last = json.loads(done.stdout)["last_seq"]
        before = await asyncio.to_thread(get, f"{url}/v1/state")
        await asyncio.to_thread(submit, url, "lost")
        with pytest.raises(LogError, match="is there already"):
            back_up(load(path), path, backup)
        with pytest.raises(LogError, match="another coordinator runs in"):
            restore(load(path), backup)
    assert backup.stat().st_mode & 0o777 == 0o700
    for where in (("--state-dir", backup), ("--log", backup / "archive")):
        of_backup = await asyncio.to_thread(unicron_replay, "digest", *where)
        assert of_backup.stdout.split()[0] == before["digest"], of_backup.stderr
    with pytest.raises(LogError, match="holds a log already"):
        restore(load(path), backup)

    keys = {key.name: key.read_bytes() for key in (state / "keys").iterdir()}
    shutil.rmtree(state)
    done = await asyncio.to_thread(unicrond, "restore", backup, "--config", path)
    assert done.returncode == 0 and f"entries 1 to {last}" in done.stdout, done.stderr
    assert {key.name: key.read_bytes() for key in (state / "keys").iterdir()} == keys
    async with daemon(path) as (_, url):
        health = await asyncio.to_thread(get, f"{url}/healthz")
        assert (health["term"], health["seq"]) == (2, last + 1)
        await asyncio.to_thread(submit, url, "b")
        tasks = (await asyncio.to_thread(get, f"{url}/v1/state"))["state"]["tasks"]
        assert sorted(tasks) == ["a", "b"]
    checked = await asyncio.to_thread(unicron_replay, "verify", "--state-dir", state)  # it is stopped now
    assert checked.returncode == 0 and "verified: every decision equals" in checked.stdout, checked.stderr


def archiver_of(process: asyncio.subprocess.Process) -> psutil.Process | None:
    """The process that archives for this head."""
    children = psutil.Process(process.pid).children()
    return next((child for child in children if child.cmdline()[-1:] == ["unicrond archive"]), None)


def alarms(url: str) -> str:
    return str(get(f"{url}/healthz")["alarms"])


def is_whole(url: str) -> bool:
    health = get(f"{url}/healthz")
    return "archive-behind" not in str(health["alarms"]) and archived_seq(url) >= int(str(health["seq"]))


async def test_head_goes_on_whatever_becomes_of_its_archive(tmp_path: Path) -> None:
    """No archive can be written; then its process hangs, as on a disk that does; is killed; and the head is."""
    path = config(tmp_path, f"log: {{archive_lag_s: 0.2, archive_dir: {tmp_path}/volume/archive}}\n")
    volume = tmp_path / "volume"
    volume.write_text("not a directory")
    async with daemon(path) as (process, url):
        reason = f"[Errno 20] Not a directory: '{volume}/archive'"
        await asyncio.to_thread(until, "the alarm", lambda: reason in alarms(url))
        await asyncio.to_thread(submit, url, "a")
        volume.unlink()
        volume.mkdir()
        await asyncio.to_thread(until, "it catches up", lambda: is_whole(url))

        archiver = archiver_of(process)
        assert archiver is not None
        archiver.suspend()
        await asyncio.to_thread(submit, url, "b")
        await asyncio.to_thread(until, "the alarm", lambda: "archive-behind" in alarms(url))
        archiver.resume()
        await asyncio.to_thread(until, "it catches up", lambda: is_whole(url))

        archiver.kill()
        await asyncio.to_thread(submit, url, "c")
        await asyncio.to_thread(until, "another one catches up", lambda: is_whole(url))
        last = archived_seq(url)
        archiver = archiver_of(process)
        assert archiver is not None
        process.kill()
        await process.wait()
        await asyncio.to_thread(archiver.wait, 20)
    async with daemon(path) as (_, url):
        await asyncio.to_thread(until, "the next head's goes on", lambda: is_whole(url) and archived_seq(url) > last)


def test_damaged_backup_is_refused(tmp_path: Path) -> None:
    of, backup = load(config(tmp_path)), tmp_path / "backup"
    with pytest.raises(LogError, match="is no backup"):
        restore(of, backup)
    (backup / "archive").mkdir(parents=True)
    manifest = {"version": "1", "made_at_s": 1, "last_seq": 0, "files": {"archive/x": "00"}}
    (backup / "backup.json").write_text(json.dumps(manifest))
    with pytest.raises(LogError, match="archive/x: is missing"):
        restore(of, backup)
    (backup / "archive" / "x").write_text("x")
    with pytest.raises(LogError, match="archive/x: was changed"):
        restore(of, backup)
    (backup / "archive" / "y").write_text("x")
    with pytest.raises(LogError, match="archive/y: is not part of the backup"):
        restore(of, backup)
    assert not (tmp_path / "state" / "nats").exists()


@pytest.mark.matrix
@pytest.mark.timeout(600)
async def test_training_resumes_from_checkpoints_under_restored_head(tmp_path: Path) -> None:
    async with live_cluster(tmp_path, nodes=2, workers=2) as live:
        await live.submit(checkpoint={"interval": 5})
        await live.training(incidents=0, beyond=30)
        await live.run("unicrond", "backup", str(tmp_path / "backup"), "--config", str(live.dev.config_path))
        later = await live.training(incidents=0, beyond=60)
        await live.dev.coordinator.stop()
        shutil.rmtree(live.dev.state_dir)
        await live.run("unicrond", "restore", str(tmp_path / "backup"), "--config", str(live.dev.config_path))
        await live.dev.coordinator.start()
        reached = later.tasks[TASK].progress.iteration
        state = await live.training(incidents=None, beyond=30)
        assert state.tasks[TASK].progress.iteration > reached, "the checkpoints are newer than the backup"
        await live.run("unicron-replay", "verify", "--state-dir", str(live.dev.state_dir))
