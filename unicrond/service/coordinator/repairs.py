"""Runs the repair command on the head. How isolated nodes come back: core/nodes/isolation.py.

Rules
-----
* A repair that is due (`isolation.repairs_due`) runs once: as a process of its own, in its own process group, at most
  RUNS_MAX at a time, and ended by SIGKILL at its time limit. The loop never waits for it.
* Its arguments are the operator's, then the node and what it needs; its environment has UNICRON_NODE, UNICRON_ADDRESS,
  UNICRON_NEEDS and UNICRON_REASON. Exit code 0 says that the node may be checked.
* A coordinator that ends, ends its repairs. The next one runs what is still due again: the command must bear that.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from unicrond.core.nodes.isolation import Repair, repairs_due
from unicrond.core.rules.survey import Survey
from unicrond.events.host import bounded_process
from unicrond.events.vocabulary import RepairEnded, Text

log = logging.getLogger("unicrond")

#: Whether the node may be checked, and the end of the command's output.
RepairOutcome: TypeAlias = tuple[bool, str]
RUNS_MAX = 8


class Repairs:
    """Runs the repairs that are due. `run`: how; `on_end(event)`: where the outcome goes."""

    def __init__(
        self, run: Callable[[Repair], Awaitable[RepairOutcome]], on_end: Callable[[RepairEnded], None]
    ) -> None:
        self._run = run
        self._on_end = on_end
        self._running: dict[str, asyncio.Task[None]] = {}
        self._past: set[str] = set()

    def look(self, survey: Survey) -> None:
        """Start the repairs that are due and have not started. Needs a running loop."""
        repairs = repairs_due(survey.state, survey.nodes.isolated)
        self._past &= {repair.nth for repair in repairs}
        for repair in repairs:
            if repair.nth not in self._running and repair.nth not in self._past and len(self._running) < RUNS_MAX:
                self._running[repair.nth] = asyncio.create_task(self._repair(repair), name=f"repair {repair.nth}")

    async def close(self) -> None:
        """End the repairs that run."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _repair(self, repair: Repair) -> None:
        log.warning("repairing node %s, which needs %s: %s", repair.node, repair.needs, repair.reason)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            success, detail = await self._run(repair)
        finally:
            self._running.pop(repair.nth, None)
        self._past.add(repair.nth)
        took_us = min(int((clock() - began_s) * 1e6), 86_400_000_000)
        self._on_end(
            RepairEnded(
                node=repair.node,
                isolation=repair.isolation,
                has_passed=success,
                duration_us=took_us,
                detail=detail[:1024],
            )
        )


def command(argv: tuple[Text, ...], timeout_s: float) -> Callable[[Repair], Awaitable[RepairOutcome]]:
    """Return what repairs a node by the operator's command."""

    async def run(repair: Repair) -> RepairOutcome:
        """Run the command for one repair; return its outcome."""
        environment = {
            **os.environ,
            "UNICRON_NODE": repair.node,
            "UNICRON_ADDRESS": repair.address,
            "UNICRON_NEEDS": repair.needs,
            "UNICRON_REASON": repair.reason,
        }
        try:
            code, output = await bounded_process.run((*argv, repair.node, repair.needs), timeout_s, environment)
        except (OSError, ValueError) as error:
            return False, f"{argv[0]} cannot be run: {error}"
        if code is None:
            return False, f"{argv[0]} did not end within {timeout_s:g} s: {output}"
        return code == 0, f"exit code {code}: {output}"

    return run
