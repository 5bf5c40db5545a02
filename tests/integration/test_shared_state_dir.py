"""Two heads on one state_dir, in two pid namespaces as in two pods: the second waits for the first one's end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
import urllib.error
import urllib.request
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.agents.processes import children, eventually, kill
from tests.integration.head import UNICROND, config, daemon, get

LEADS_S = 5.0
_NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


@asynccontextmanager
async def head_elsewhere(path: Path) -> AsyncIterator[tuple[int, str]]:
    """A head as process 1 of a pid namespace; yields its pid as seen from here, and its URL. All of it ends with it."""
    with (path.parent / "elsewhere.log").open("wb") as log:
        outside = subprocess.Popen(  # noqa: ASYNC220
            [*_NAMESPACE, UNICROND, "run", "--config", str(path)], stdout=log, stderr=log
        )
    try:
        text = ""
        async with asyncio.timeout(60):
            while "live at" not in text:
                await asyncio.sleep(0.05)
                text = (path.parent / "elsewhere.log").read_text()
        (first,) = children(outside.pid)
        yield first, text.split("API at ")[1].split()[0]
    finally:
        for child in children(outside.pid):
            kill(child)
        outside.wait()


def answer(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


@pytest.mark.skipif(
    bool(subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode),
    reason="no namespaces here",
)
async def test_second_head_waits_for_first_one_elsewhere(tmp_path: Path) -> None:
    first_config = config(tmp_path)
    async with head_elsewhere(first_config) as (first, first_url):
        second_config = tmp_path / "second.yaml"
        text = config(tmp_path).read_text()  # ports of its own
        second_config.write_text(text)
        port = text.split("api: {port: ")[1].split("}")[0]
        waiting = f"http://127.0.0.1:{port}"
        stopped = await asyncio.create_subprocess_exec(
            UNICROND, "run", "--config", str(second_config), stdout=DEVNULL, stderr=DEVNULL
        )
        try:
            assert await asyncio.to_thread(eventually, lambda: answer(f"{waiting}/livez")[0] == 200, 60)
            status, body = await asyncio.to_thread(answer, f"{waiting}/readyz")
            assert status == 503 and "is in use by another head, on" in body
            stopped.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(stopped.wait(), 20) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                stopped.kill()
        second = asyncio.create_task(anext(head := _second(second_config)))
        try:
            assert await asyncio.to_thread(eventually, lambda: answer(f"{waiting}/livez")[0] == 200, 60)
            assert (await asyncio.to_thread(get, f"{first_url}/healthz"))["status"] == "live"
            assert not second.done()
            end_s = time.monotonic()
            kill(first)
            url = await asyncio.wait_for(second, 60)
            leads_s = time.monotonic() - end_s
            print(f"the second head leads {leads_s:.2f} s after the first one's end")
            assert leads_s < LEADS_S, "the lock tells of the end, the lease's time need not pass"
            assert (await asyncio.to_thread(get, f"{url}/healthz"))["term"] == 2
        finally:
            second.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await second
            await head.aclose()


async def _second(path: Path) -> AsyncIterator[str]:
    async with daemon(path) as (_, url):
        yield url
