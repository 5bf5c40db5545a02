"""Runs a health check of this node in a child process, which says whether the node may work again.

Rules
-----
* The operator's command, or the agent's own self-test (`self_test.py`). Exit code 0 passes; the report holds its last
  words.
* It runs niced, in a process group of its own, and dies with the agent. At its time limit the group is killed: failed.
* Its environment has UNICRON_NODE and UNICRON_REASON.
* One at a time; the core sees to that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

from unicrond.agents.core.state import Checked, Input, RunCheck
from unicrond.events.host import bounded_process

logger = logging.getLogger("unicrond.agents")

_NICENESS = 10


class Health:
    """Runs the checks of one node. `accelerators`: the source of its GPUs' health (cli.py). `feed`: receives
    Checked."""

    def __init__(self, node: str, slots: int, accelerators: str, feed: Callable[[Input], None]) -> None:
        self._node = node
        self._self_test = (
            *(sys.executable, "-P", "-m", "unicrond.agents.health.self_test"),
            *("--slots", str(slots), "--accelerators", accelerators),
        )
        self._feed = feed
        self._running: set[asyncio.Task[None]] = set()

    def check(self, request: RunCheck) -> None:
        """Begin the check that is asked for. Needs a running loop."""
        task = asyncio.create_task(self._check(request), name="health check")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Cancel a check that runs; its outcome is not reported."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _check(self, request: RunCheck) -> None:
        argv = request.argv or (*self._self_test, "--limit-s", str(request.limit_s))
        logger.info("health check: %s", " ".join(argv))
        began_s = time.monotonic()
        environment = {**os.environ, "UNICRON_NODE": self._node, "UNICRON_REASON": request.reason}
        has_passed, detail = await run(argv, request.limit_s, environment)
        logger.log(logging.INFO if has_passed else logging.WARNING, "health check: %s", detail)
        took_us = int((time.monotonic() - began_s) * 1e6)
        self._feed(Checked(command_id=request.command_id, has_passed=has_passed, duration_us=took_us, detail=detail))


async def run(argv: Sequence[str], limit_s: float, environment: dict[str, str]) -> tuple[bool, str]:
    """Run the command; return whether it ended with code 0 in time, and its last output."""
    # `unicrond.agents.host.die_with_parent` stands between: it lowers the priority and asks the kernel to end the
    # command with the agent.
    shelled = (
        sys.executable,
        "-P",
        "-m",
        "unicrond.agents.host.die_with_parent",
        str(os.getpid()),
        str(_NICENESS),
        *argv,
    )
    try:
        code, output = await bounded_process.run(shelled, limit_s, environment)
    except (OSError, ValueError) as error:
        return False, f"{argv[0]} cannot be run: {error}"
    if code is None:
        return False, f"did not end within {limit_s:g} s: {output}"
    return code == 0, output if code in (0, 1) and output != bounded_process.SILENT else f"exit code {code}: {output}"
