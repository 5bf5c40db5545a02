"""The probes of a head, over real outages: what says "keep it", and what says "it does its work"."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.head import UNICROND, config, daemon
from unicrond.events.nats.server import EmbeddedServer
from unicrond.local.dev import free_port

#: A kubelet asks a head every ten seconds whether it lives, and bears six failures.
GAP_S = 10.0


def probe(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.loads(refusal.read())


async def becomes(url: str, path: str, status: int, word: str = "") -> dict[str, object]:
    """What the probe says once it has the status, and says the word; the liveness probe says 200 all the time."""
    answered_s = asyncio.get_running_loop().time()
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await asyncio.to_thread(probe, f"{url}/livez"))[0] == 200
                found, told = await asyncio.to_thread(probe, url + path)
            except (urllib.error.URLError, ConnectionError):  # nothing listens for a moment between porch and API
                assert asyncio.get_running_loop().time() - answered_s < GAP_S
            else:
                answered_s = asyncio.get_running_loop().time()
                if found == status and (not word or told["status"] == word):
                    return told
            await asyncio.sleep(0.05)


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """Not started."""
    server = EmbeddedServer(tmp_path / "nats", port=free_port(), dies_with_us=True)
    yield server
    await server.stop()


async def begun(path: Path, nats: EmbeddedServer) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(UNICROND, "run", "--config", str(path), "--nats", nats.url), stderr=asyncio.subprocess.DEVNULL
    )


async def answers(url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await asyncio.to_thread(probe, f"{url}/livez")
                return
            except OSError:
                await asyncio.sleep(0.05)


async def test_head_waits_for_nats_and_survives_outage(tmp_path: Path, nats: EmbeddedServer) -> None:
    path = config(tmp_path)
    url = "http://127.0.0.1:" + path.read_text().split("api: {port: ")[1].split("}")[0]
    head = await begun(path, nats)
    try:
        await answers(url)
        async with asyncio.timeout(60):
            while "no NATS at" not in str((found := await asyncio.to_thread(probe, f"{url}/readyz"))[1]["trouble"]):
                assert found[0] == 503
                await asyncio.sleep(0.05)
        assert (await asyncio.to_thread(probe, f"{url}/healthz"))[0] == 200
        status, told = await asyncio.to_thread(probe, f"{url}/v1/state")
        assert status == 503 and "no NATS at" in str(told["error"])

        await nats.start()
        await becomes(url, "/readyz", 200, "live")
        await nats.stop()
        assert (await becomes(url, "/readyz", 503))["trouble"]
        await nats.start()
        await becomes(url, "/readyz", 200, "live")
        assert head.returncode is None
    finally:
        head.send_signal(signal.SIGINT)
        await asyncio.wait_for(head.wait(), 20)
    assert head.returncode == 0


async def test_waiting_head_ends_on_signal(tmp_path: Path, nats: EmbeddedServer) -> None:
    path = config(tmp_path)
    url = "http://127.0.0.1:" + path.read_text().split("api: {port: ")[1].split("}")[0]
    head = await begun(path, nats)
    await answers(url)
    head.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(head.wait(), 30) == 0


async def test_blocked_log_makes_head_unready_but_alive(tmp_path: Path) -> None:
    async with daemon(config(tmp_path)) as (_, url):
        assert (await becomes(url, "/readyz", 200, "live"))["trouble"] == ""
        pid = int((tmp_path / "state" / "nats" / "nats-server.pid").read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            assert (await becomes(url, "/readyz", 503))["status"] == "log takes nothing"
        finally:
            os.kill(pid, signal.SIGCONT)
        await becomes(url, "/readyz", 200)
