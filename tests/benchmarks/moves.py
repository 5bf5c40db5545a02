"""What each kind of move costs a task, with all real parts: how long nobody trains, and when the next step is made.

    python -m tests.benchmarks.moves --repetitions 10

| move | what happens |
|---|---|
| regroup | one of three replicas is killed, the others go on |
| move | a node is drained, a worker on a free one takes the state and joins, the old one leaves |
| reshape | tp 1 becomes 2, and 2 becomes 1: all hand over, end, others begin |
| restart | the only replica is killed, its successor takes the state from memory |

Both times are read from the workers' marks, which say when each iteration began (CLOCK_MONOTONIC). `stall`: the longest
time between two beginnings, less the usual one. `until the next step`: from the kill or the request until the first
iteration that begins after the stall has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from unicrond.agents.protocol import marks
from unicrond.core.state.state import ClusterState, Task
from unicrond.ctl.client import Client
from unicrond.local.dev import DevCluster, small_cluster

_TASK = {
    "name": "big",
    "model": {"layers": 2, "hidden": 64, "heads": 2, "seq": 64},
    "global_batch": 12,
    "iterations": 1_000_000,
    "checkpoint": {"interval": 0, "memory_interval": 5},
}
_SETTINGS = {"policy": {"strikes_max": 10_000, "stuck_max": 10_000, "flaps_max": 16}}
_LOOK_S = 0.001
#: Steady training before a move, and after it.
_CALM_S = 1.5


class Cost(NamedTuple):
    """Of one move, milliseconds."""

    stall_ms: float
    until_next_ms: float


class Beginnings:
    """When iterations began, as the marks of all workers on these nodes have said since `watch` began."""

    def __init__(self, cluster: DevCluster, directory: Path) -> None:
        self._cluster = cluster
        self._directory = directory
        #: By generation and iteration, when the first worker began it.
        self.seen_us: dict[tuple[int, int], int] = {}

    def look(self) -> None:
        """Read each mark once."""
        for path in self._directory.glob("run/*/marks/*"):
            mark = marks.read(path)
            if mark is not None and mark.iteration and mark.boundary_us:
                which = mark.generation, mark.iteration
                self.seen_us[which] = min(self.seen_us.get(which, mark.boundary_us), mark.boundary_us)

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)


def cost_of(seen_us: dict[tuple[int, int], int], asked_us: int) -> Cost:
    """The longest wait around the request, less the usual, and when it was over."""
    times = sorted(seen_us.values())
    steps = list(itertools.pairwise(times))
    usual_us = statistics.median(after - before for before, after in steps)
    around = [(after - before, after) for before, after in steps if after > asked_us]
    longest_us, over_us = max(around)
    return Cost(max(0.0, longest_us - usual_us) / 1e3, (over_us - asked_us) / 1e3)


async def until(cluster: DevCluster, holds: Callable[[Task], object]) -> ClusterState:
    """The state once the task trains and `holds` of it."""
    while True:
        state, _ = await cluster.state()
        task = state.tasks.get("big")
        if task and task.confirmed and task.progress.committed_generation == task.generation and holds(task):
            return state
        await asyncio.sleep(0.02)


async def measured(
    cluster: DevCluster, directory: Path, begin: Callable[[], Awaitable[None]], over: Callable[[Task], object]
) -> Cost:
    """One move: `begin` asks for it, `over` says that the task trains again as it should."""
    beginnings = Beginnings(cluster, directory)
    watching = asyncio.create_task(beginnings.watch())
    try:
        await asyncio.sleep(_CALM_S)
        asked_us = marks.now_us()
        await begin()
        await until(cluster, over)
        await asyncio.sleep(_CALM_S)
    finally:
        watching.cancel()
    return cost_of(beginnings.seen_us, asked_us)


@asynccontextmanager
async def clustered(nodes: int, slots: int, **task: Any) -> AsyncIterator[tuple[DevCluster, Path]]:
    """A cluster on which the task trains."""
    with tempfile.TemporaryDirectory(prefix="unicron-moves-") as scratch:
        directory = Path(scratch)
        async with small_cluster(directory, nodes=nodes, slots=slots, heartbeat_s=2.0, settings=_SETTINGS) as cluster:
            await cluster.submit({**_TASK, "env": {"XDG_CACHE_HOME": str(directory / "cache")}, **task})
            await until(cluster, lambda task: task.progress.iteration > 20)
            yield cluster, directory


async def kills(repetitions: int, workers: int) -> list[Cost]:
    """The last worker is killed, and another takes its place."""
    costs = []
    async with clustered(workers, 1, max_workers=workers) as (cluster, directory):
        for _ in range(repetitions):
            state = await until(cluster, lambda task: len(task.workers) == workers and task.copies.holdings)
            generation, pid = state.tasks["big"].generation, list(state.tasks["big"].workers.values())[-1].pid

            async def kill(pid: int = pid) -> None:
                os.kill(pid, signal.SIGKILL)

            def again(task: Task, since: int = generation) -> bool:
                return task.generation > since

            costs.append(await measured(cluster, directory, kill, again))
    return costs


async def drains(repetitions: int) -> list[Cost]:
    """A worker moves to the free node."""
    costs = []
    async with clustered(3, 1, max_workers=2) as (cluster, directory):
        client = Client(cluster.url)
        for _ in range(repetitions):
            state = await until(cluster, lambda task: len(task.workers) == 2)
            node = next(iter(state.tasks["big"].workers.values())).node

            async def drain(node: str = node) -> None:
                await asyncio.to_thread(client.cordon, node, drain=True, reason="benchmark")

            def moved(task: Task, node: str = node) -> bool:
                return len(task.workers) == 2 and all(worker.node != node for worker in task.workers.values())

            costs.append(await measured(cluster, directory, drain, moved))
            await asyncio.to_thread(client.uncordon, node, "benchmark")
    return costs


async def reshapes(repetitions: int) -> list[Cost]:
    """tp 1 and tp 2 in turns."""
    costs = []
    async with clustered(1, 2) as (cluster, directory):
        client = Client(cluster.url)
        for number in range(repetitions):
            tp = 2 - number % 2

            async def reshape(tp: int = tp) -> None:
                await asyncio.to_thread(client.reshape, "big", {"tp": tp, "min_workers": tp, "max_workers": tp})

            def reshaped(task: Task, tp: int = tp) -> bool:
                return task.spec.tp == tp and task.reshaping.reshape is None and len(task.workers) == tp

            costs.append(await measured(cluster, directory, reshape, reshaped))
    return costs


def table(costs: dict[str, list[Cost]]) -> str:
    """Markdown: a line for each kind."""
    lines = ["| move | stall, ms: median (range) | until the next step, ms |", "|---|---:|---:|"]
    for kind, own in costs.items():
        columns = [[one.stall_ms for one in own], [one.until_next_ms for one in own]]
        told = [f"{statistics.median(ms):.0f} ({min(ms):.0f} to {max(ms):.0f})" for ms in columns]
        lines.append(f"| {kind} | {told[0]} | {told[1]} |")
    return "\n".join(lines)


async def main(repetitions: int) -> None:
    """All four kinds, each on a cluster of its own."""
    began_s = time.monotonic()
    costs = {
        "regroup": await kills(repetitions, 3),
        "move": await drains(repetitions),
        "reshape": await reshapes(repetitions),
        "restart": await kills(repetitions, 1),
    }
    print(table(costs))
    print(f"{repetitions} of each in {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    asyncio.run(main(parser.parse_args().repetitions))
