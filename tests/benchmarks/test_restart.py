"""A warm restart (SEV2), with all real parts: from the kill of a task's only worker until its successor trains.

    python -m tests.benchmarks.test_restart --repetitions 10

The stages are read from the log: when the agent saw each thing (its wall clock; all on one machine).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from unicrond.local.dev import DevCluster, small_cluster

TASK = {
    "name": "solo",
    "model": {"layers": 1, "hidden": 32, "heads": 2, "seq": 16},
    "global_batch": 4,
    "iterations": 1_000_000,
    "checkpoint": {"interval": 0, "memory_interval": 5},
}
#: Stage -> the event that ends it.
STAGES = {
    "killed -> the agent knows": "WorkerExited",
    "-> the coordinator orders another": "StartWorker",
    "-> its process is forked": "WorkerStarted",
    "-> its model is built": "WorkerReady",
    "-> its membership is decided": "MembershipDecided",
    "-> it has state, and trains": "WorkerJoinedGroup",
}


async def events(cluster: DevCluster, after: int) -> list[dict[str, Any]]:
    """Entries of the log after a sequence."""
    url = f"{cluster.url}/v1/events?after={after}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        lines = (await response.text()).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


async def one_restart(cluster: DevCluster) -> dict[str, float]:
    """Milliseconds by stage."""
    while True:
        state, _ = await cluster.state()
        task = state.tasks.get("solo")
        if (
            task
            and task.copies.holdings
            and task.confirmed
            and task.progress.iteration > task.progress.checkpoint_iteration + 20
            and task.workers
        ):
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.5)  # steady training
    state, _ = await cluster.state()
    (worker,) = state.tasks["solo"].workers.values()
    killed_us = time.time_ns() // 1000
    os.kill(worker.pid, signal.SIGKILL)
    while True:
        found: dict[str, int] = {}
        for entry in await events(cluster, state.seq):
            envelope = entry.get("envelope", {})
            kind = envelope.get("event", {}).get("type")
            if kind in STAGES.values() and envelope["observed_at_us"] >= killed_us:
                found.setdefault(kind, envelope["observed_at_us"])
        if len(found) == len(STAGES):
            break
        await asyncio.sleep(0.05)
    times = [killed_us, *(found[kind] for kind in STAGES.values())]
    spent = {stage: (after - before) / 1e3 for stage, before, after in zip(STAGES, times, times[1:], strict=False)}
    return {**spent, "together": (times[-1] - killed_us) / 1e3}


async def measure(repetitions: int, directory: Path) -> dict[str, list[float]]:
    """Milliseconds of each repetition, by stage."""
    settings = {"policy": {"strikes_max": 1000, "stuck_max": 1000}}
    async with small_cluster(directory, nodes=2, heartbeat_s=2.0, settings=settings) as cluster:
        await cluster.submit({**TASK, "env": {"XDG_CACHE_HOME": str(directory / "cache")}})
        runs = [await one_restart(cluster) for _ in range(repetitions)]
    return {stage: [run[stage] for run in runs] for stage in runs[0]}


def report(measured: dict[str, list[float]]) -> str:
    """A line for each stage."""
    return "\n".join(
        f"{stage:36} median {statistics.median(ms):6.1f} ms, {min(ms):6.1f} to {max(ms):6.1f}"
        for stage, ms in measured.items()
    )


@pytest.mark.timeout(300)
async def test_warm_restart_time(tmp_path: Path) -> None:
    print(report(await measure(3, tmp_path)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-restart-") as scratch:
        print(report(asyncio.run(measure(chosen.repetitions, Path(scratch)))))
