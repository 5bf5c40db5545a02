"""The event log is deleted under a running head: what the head says, and one command that brings the log back."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

from tests.integration.head import UNICROND, config, daemon, get
from tests.integration.test_known_log import says
from tests.integration.test_log_life import is_whole, unicrond, until
from tests.integration.test_probes import answers, becomes
from tests.replay.command import unicron_replay
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Login, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api
from unicrond.events.wire.envelope import Entry


async def deleted(state_dir: Path) -> list[Entry]:
    """Delete the log with the operator's key, and return what it held."""
    server = EmbeddedServer.beside(state_dir / "nats")
    await server.adopt()
    login = Login(key=state_dir / "keys" / "operator.key")
    operator = await connect(server.url, name="somebody", login=login, timeout_s=10)
    try:
        log = NatsEventLog(operator)
        entries = [entry async for entry in log.read(until_seq=await log.last_seq())]
        await api(operator, f"STREAM.DELETE.{EVENT_STREAM}", {})
    finally:
        await operator.close()
    return entries


async def test_deleted_log_is_restored_by_one_command(tmp_path: Path) -> None:
    path = config(tmp_path, auth="on")
    state = tmp_path / "state"
    async with daemon(path) as (_, url):
        assert (await asyncio.to_thread(unicrond, "archive", "--config", path)).returncode == 0
        refusal = await asyncio.to_thread(unicrond, "restore", "--config", path)
        assert refusal.returncode == 1 and "a log is never overwritten" in refusal.stderr
        archive, elsewhere = state / "archive", tmp_path / "elsewhere"
        archive.rename(elsewhere)
        refusal = await asyncio.to_thread(unicrond, "restore", "--config", path, elsewhere)
        assert refusal.returncode == 1 and "a log is never overwritten" in refusal.stderr
        assert not archive.exists(), "a refusal leaves nothing behind"
        elsewhere.rename(archive)
        before = await asyncio.to_thread(unicron_replay, "digest", "--state-dir", state)
        entries = await deleted(state)
        await says(url, "NATS has no event log, and this head has read one of")
        done = await asyncio.to_thread(unicrond, "restore", "--config", path, "--check")
        assert done.returncode == 0 and "would be restored" in done.stdout, done.stderr
        done = await asyncio.to_thread(unicrond, "restore", "--config", path, "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["first_seq"], report["last_seq"], report["gap"]) == (1, len(entries), 0)
        after = await asyncio.to_thread(unicron_replay, "digest", "--state-dir", state)
        assert after.stdout == before.stdout and after.stdout
        assert await asyncio.to_thread(get, f"{url}/healthz")


async def test_log_is_restored_while_the_next_head_waits_for_it(tmp_path: Path) -> None:
    """As on Kubernetes, where the pod of the head was made anew before anybody looked: it lives, and waits."""
    path = config(tmp_path, auth="on")
    state = tmp_path / "state"
    async with daemon(path) as (_, url):
        await asyncio.to_thread(until, "all is archived", lambda: is_whole(url))
        entries = await deleted(state)
        await says(url, "NATS has no event log, and this head has read one of")
    process = await asyncio.create_subprocess_exec(
        *(UNICROND, "run", "--config", str(path)), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await answers(url)
        await says(url, "NATS has no event log, and this head knows one of")
        done = await asyncio.to_thread(unicrond, "restore", "--config", path, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["last_seq"] == len(entries)
        await becomes(url, "/readyz", 200)
    finally:
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 30)
