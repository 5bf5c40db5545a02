"""Health checks of this node: a child process that says whether the node may work again.

Rules
-----
* The operator's command, or the agent's own self-test (`self_test.py`). Exit code 0 passes; what it said last is told.
* It runs niced, in a process group of its own, and dies with the agent. At its time limit the group is killed: failed.
* Its environment has UNICRON_NODE and UNICRON_REASON.
* One at a time; the core sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from agents.state import Checked, Input, RunCheck

logger = logging.getLogger("agents")

_NICENESS = 10
_OUTPUT_BYTES = 16 * 1024
_DETAIL_CHARS = 600


class Health:
    """Runs the checks of one node. `accelerators`: who tells of its GPUs (cli.py). `feed`: takes Checked."""

    def __init__(self, node: str, slots: int, accelerators: str, feed: Callable[[Input], None]) -> None:
        self._node = node
        self._self_test = (
            *(sys.executable, "-m", "agents.self_test"),
            *("--slots", str(slots), "--accelerators", accelerators),
        )
        self._feed = feed
        self._running: set[asyncio.Task[None]] = set()

    def check(self, asked: RunCheck) -> None:
        """Begin a check. Needs a running loop."""
        task = asyncio.create_task(self._check(asked), name="health check")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """End a check that runs; it is not told of."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _check(self, asked: RunCheck) -> None:
        argv = asked.argv or (*self._self_test, "--limit-s", str(asked.limit_s))
        logger.info("health check: %s", " ".join(argv))
        began_s = time.monotonic()
        environment = {**os.environ, "UNICRON_NODE": self._node, "UNICRON_REASON": asked.reason}
        passed, detail = await run(argv, asked.limit_s, environment)
        logger.log(logging.INFO if passed else logging.WARNING, "health check: %s", detail)
        took_us = int((time.monotonic() - began_s) * 1e6)
        self._feed(Checked(command_id=asked.command_id, passed=passed, duration_us=took_us, detail=detail))


async def run(argv: Sequence[str], limit_s: float, environment: dict[str, str]) -> tuple[bool, str]:
    """Whether the command ended with code 0 in time, and what it said last."""
    # A shell between: the kernel ends who runs under it when the agent dies, and the command is niced from its start.
    shelled = (sys.executable, "-m", "agents.under", str(os.getpid()), str(_NICENESS), *argv)
    try:
        process = await asyncio.create_subprocess_exec(
            *shelled,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return False, f"{argv[0]} cannot be run: {error}"
    said = bytearray()
    reading = asyncio.create_task(_keep_last(process.stdout, said), name="output of a health check")
    try:
        async with asyncio.timeout(limit_s):
            code = await process.wait()
        await asyncio.wait([reading], timeout=1.0)  # who lives on in the background may hold the pipe for ever
    except TimeoutError:
        return False, f"no end within {limit_s:g} s: {_line(said)}"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        reading.cancel()
        await process.wait()
    return code == 0, _line(said) if code in (0, 1) and said else f"exit code {code}: {_line(said)}"


async def _keep_last(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    while stream is not None and (piece := await stream.read(_OUTPUT_BYTES)):
        kept += piece
        del kept[:-_OUTPUT_BYTES]


def _line(said: bytearray) -> str:
    """The end of what a process has said, on one line."""
    text = "".join(char if char.isprintable() else " " for char in said.decode(errors="replace"))
    return " ".join(text.split())[-_DETAIL_CHARS:] or "it said nothing"
