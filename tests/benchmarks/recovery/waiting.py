"""What the faults wait for: that every rank trains again, at the full global batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.benchmarks.recovery.cell import Cell
from tests.benchmarks.recovery.figures import NotYet
from tests.benchmarks.recovery.witness import Traces

T = TypeVar("T")
_LOOK_S = 0.1
_TIMEOUT_S = 120.0


async def until(what: str, look: Callable[[], T]) -> T:
    """What `look` gives once it does not raise NotYet. Raises TimeoutError."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            return look()
        except NotYet:
            await asyncio.sleep(_LOOK_S)
    raise TimeoutError(f"not within {_TIMEOUT_S:g} s: {what}")


async def steady(traces: Traces, cell: Cell, since_us: int, steps: int) -> list[str]:
    """Wait until every rank lives and has made so many full steps since; their processes, as in the traces."""

    def all_train() -> list[str]:
        counts: dict[str, int] = {}
        for line in traces.look():
            if line.word == "stepped" and line.at_us > since_us and line.numbers[1] == cell.micro_batches:
                counts[line.process] = counts.get(line.process, 0) + 1
        living = [process for process, count in counts.items() if count >= steps and lives(process)]
        if len(living) != cell.ranks:
            raise NotYet
        return sorted(living)

    return await until(f"{cell.ranks} ranks of {cell.system} train", all_train)


def lives(process: str) -> bool:
    return Path(f"/proc/{process.rpartition('.')[2]}").exists()
