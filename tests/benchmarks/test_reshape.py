"""Another tp for a running task, with all real parts: from the request until the workers of the new layout train.

    python -m tests.benchmarks.test_reshape --repetitions 10

One replica on one node of two slots; tp 1 and tp 2 in turns. The stages are read from the log, by the wall clock of who
observed or decided (all on one machine).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import pytest

from tests.benchmarks.test_restart import TASK, events, report
from unicrond.core.state.state import ClusterState, Task
from unicrond.ctl.client import Client
from unicrond.local.dev import DevCluster, small_cluster

#: Stage -> the event that ends it, the last of its kind; of orders the first.
STAGES = {
    "asked -> all are told to leave": "MembershipDecided",
    "-> the state is in memory, all parked": "WorkerPaused",
    "-> all have ended": "TaskReshaped",
    "-> planned, and others ordered": "StartWorker",
    "-> their models are built": "WorkerReady",
    "-> they have the state, and train": "WorkerJoinedGroup",
}
FIRST = ("MembershipDecided", "StartWorker")


async def one_reshape(cluster: DevCluster, tp: int) -> dict[str, float]:
    """Milliseconds by stage."""
    state = await trains(cluster, 3 - tp)
    state = await trains(cluster, 3 - tp, beyond=state.tasks["solo"].progress.iteration + 20)
    await asyncio.to_thread(Client(cluster.url).reshape, "solo", {"tp": tp, "max_workers": tp, "min_workers": tp})
    await trains(cluster, tp)
    seen: dict[str, int] = {}
    for entry in await events(cluster, state.seq):
        envelope = entry.get("envelope", {})
        kind, at_us = envelope.get("event", {}).get("type"), envelope.get("observed_at_us", 0)
        seen[kind] = min(at_us, seen.get(kind, at_us)) if kind in FIRST else at_us
    times = [seen["ReshapeRequested"], *(seen[kind] for kind in STAGES.values())]
    spent = {stage: (after - start) / 1e3 for stage, start, after in zip(STAGES, times, times[1:], strict=False)}
    still = (seen["WorkerJoinedGroup"] - seen["WorkerPaused"]) / 1e3
    return {**spent, "together": (times[-1] - times[0]) / 1e3, "of which nobody trains": still}


async def trains(cluster: DevCluster, tp: int, beyond: int = 0) -> ClusterState:
    """The state, once the task has committed a step with that tp, after iteration `beyond`."""
    while True:
        state, _ = await cluster.state()
        task = state.tasks.get("solo")
        if task is not None and _has(task, tp) and task.progress.iteration > beyond:
            return state
        await asyncio.sleep(0.02)


def _has(task: Task, tp: int) -> bool:
    trains_now = bool(task.workers) and task.confirmed and task.progress.committed_generation == task.generation
    return trains_now and task.spec.tp == tp and task.reshaping.reshape is None


async def measure(repetitions: int, directory: Path) -> dict[str, list[float]]:
    """Milliseconds of each repetition, by stage."""
    async with small_cluster(directory, nodes=1, slots=2, heartbeat_s=2.0) as cluster:
        await cluster.submit({**TASK, "env": {"XDG_CACHE_HOME": str(directory / "cache")}})
        runs = [await one_reshape(cluster, 2 - number % 2) for number in range(repetitions)]
    return {stage: [run[stage] for run in runs] for stage in runs[0]}


@pytest.mark.timeout(300)
async def test_reshape_time(tmp_path: Path) -> None:
    print(report(await measure(2, tmp_path)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-reshape-") as scratch:
        print(report(asyncio.run(measure(chosen.repetitions, Path(scratch)))))
