"""`unicrond run` as a process, for tests: its configuration, its start and end, and what people ask it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from unicrond.local.dev import free_port

UNICROND = str(Path(sys.executable).parent / "unicrond")


def config(directory: Path, extra: str = "", *, auth: str = "off") -> Path:
    """`auth`: "on" as people have it; most tests read the log and the API as they please."""
    path = directory / "unicron.yaml"
    ports = f"nats: {{port: {free_port()}}}\napi: {{port: {free_port()}}}\n"
    path.write_text(f"state_dir: {directory / 'state'}\n{ports}auth: {auth}\n{extra}")
    return path


@asynccontextmanager
async def daemon(path: Path, *options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        UNICROND, "run", "--config", str(path), *options, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    url = ""
    try:
        async with asyncio.timeout(60):
            async for line in process.stderr:
                if b"API at " in line:
                    url = line.decode().split("API at ")[1].strip()
                if b"live at" in line:
                    break
        assert url, "the daemon ended before it served"
        yield process, url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 30)


def get(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


def ctl(url: str, *arguments: str) -> str:
    return subprocess.run(
        [str(Path(UNICROND).with_name("unicronctl")), "--url", url, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
