"""Two debug tasks are submitted where production has every node: production keeps its workers. It takes a minute.

    python examples/floors.py

Three agents run on this machine. `prod` (weight 10, at least three workers) trains on all of them; then two tasks of
weight 0.01 and one worker are submitted. They wait; the exit code is 0 if `prod` never had fewer than three workers in
a plan. Nothing stays on disk. The rules: docs/use/task-files.md#priorities.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unicrond.core.state.state import ClusterState
from unicrond.local.dev import DevCluster, small_cluster

NODES, WATCHED_S, TIMEOUT_S = 3, 15.0, 60.0


def spec(name: str, weight: float, workers: int) -> dict[str, Any]:
    """Return a small GPT on the standard library's sources, with so many workers and not fewer."""
    return {
        "name": name,
        "weight": weight,
        "min_workers": workers,
        "max_workers": workers,
        "model": {"layers": 2, "hidden": 32, "heads": 4, "seq": 64, "vocab": 256},
        "global_batch": 12,
        "iterations": 1_000_000,
    }


async def until(cluster: DevCluster, goal: str, holds: Callable[[ClusterState], bool]) -> None:
    """Wait for a state in which `holds`. Raises TimeoutError."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        state, _ = await cluster.state()
        if holds(state):
            print(f"{goal}: {state.plan.reason}", flush=True)
            return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"waited {TIMEOUT_S:g} s for this: {goal}")


async def main() -> int:
    """Play the case; the exit code is 0 if production kept its workers."""
    with tempfile.TemporaryDirectory() as directory:
        async with small_cluster(Path(directory), nodes=NODES) as cluster:
            await cluster.submit(spec("prod", 10.0, NODES))
            await until(
                cluster,
                "prod trains on all nodes",
                lambda s: "prod" in s.tasks and s.tasks["prod"].confirmed and s.tasks["prod"].progress.iteration > 3,
            )
            for name in ("debug1", "debug2"):
                await cluster.submit(spec(name, 0.01, 1))
            await until(cluster, "both debug tasks are planned", lambda s: len(s.plan.assignments) == 3)
            fewest, until_s = NODES, time.monotonic() + WATCHED_S
            while time.monotonic() < until_s:
                state, _ = await cluster.state()
                fewest = min(fewest, state.plan.workers["prod"])
                await asyncio.sleep(0.2)
            for name, task in state.tasks.items():
                print(f"{name:8} {state.plan.workers[name]} workers, iteration {task.progress.iteration}")
    print(f"prod never had fewer than {fewest} of its {NODES} workers in {WATCHED_S:g} s")
    return 0 if fewest == NODES else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
