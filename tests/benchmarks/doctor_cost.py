"""What `unicronctl doctor` costs nodes whose cores all train: their pace with it and without, and its CPU time.

    python -m tests.benchmarks.doctor_cost --rounds 5

A small cluster with a node for each core, the built-in GPT on all of them. Each round trains for a while, then has
doctor look; what happened in both is counted from the log's StepCommitted, in iterations a second. `cpu_s`: of the
processes that sum, all nodes together; `life_s`: how long the longest lived; `load`: of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from events.envelope import Recorded
from events.vocabulary import StepCommitted
from unicrond.ctl.client import Client
from unicrond.local.dev import DevCluster, small_cluster

CALM_S = 15.0
_TASK = {
    "name": "big",
    "model": {"layers": 2, "hidden": 64, "heads": 2, "seq": 64},
    "global_batch": 12,
    "iterations": 1_000_000,
    "checkpoint": {"interval": 0, "memory_interval": 0},
}


def summing() -> Iterator[psutil.Process]:
    """The processes of doctor's sums."""
    for process in psutil.process_iter(["cmdline"]):
        if "agents.pair_sum" in (process.info["cmdline"] or ()) and "agents.under" not in process.info["cmdline"]:
            yield process


def doctor(url: str) -> tuple[float, float]:
    """Have it look; CPU seconds of all sums, and the longest life of one."""
    command = [str(Path(sys.executable).with_name("unicronctl")), "--url", url, "doctor", "--limit-s", "300", "--json"]
    used_s: dict[int, float] = {}
    lives_s: dict[int, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE) as asked:
        while asked.poll() is None:
            for process in summing():
                try:
                    used_s[process.pid] = sum(process.cpu_times()[:2])
                    lives_s[process.pid] = time.time() - process.create_time()
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.1)
        assert asked.stderr is not None
        if "sums of" in (told := asked.stderr.read()):
            raise SystemExit(f"a node did not sum: {told}")
    return sum(used_s.values()), max(lives_s.values(), default=0.0)


def pace(client: Client, after: int, until: int) -> float:
    """Iterations a second between these entries of the log."""
    steps = [
        (entry.recorded_at_us, entry.envelope.event.last)
        for entry in client.entries(after, until)
        if isinstance(entry, Recorded) and isinstance(entry.envelope.event, StepCommitted)
    ]
    (first_us, first), (last_us, last) = steps[0], steps[-1]
    return (last - first) / ((last_us - first_us) / 1e6)


async def measured(cluster: DevCluster, rounds: int) -> list[dict[str, float]]:
    client, found = Client(cluster.url), []
    await cluster.submit(_TASK)
    while (await cluster.state())[0].tasks["big"].progress.iteration < 50:  # noqa: ASYNC110
        await asyncio.sleep(0.2)

    async def end() -> int:
        return int((await asyncio.to_thread(client.health))["seq"])

    for _ in range(rounds):
        began = await end()
        await asyncio.sleep(CALM_S)
        calm = await end()
        cpu_s, life_s = await asyncio.to_thread(doctor, cluster.url)
        ended = await end()
        without, beside = pace(client, began, calm), pace(client, calm, ended)
        found.append(
            {"without": without, "beside": beside, "cpu_s": cpu_s, "life_s": life_s, "load": os.getloadavg()[0]}
        )
        print(json.dumps({name: round(value, 2) for name, value in found[-1].items()}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    async def work() -> list[dict[str, float]]:
        with tempfile.TemporaryDirectory() as directory:
            async with small_cluster(Path(directory), nodes=os.cpu_count() or 1) as cluster:
                return await measured(cluster, options.rounds)

    found = asyncio.run(work())
    slower = statistics.median(1 - one["beside"] / one["without"] for one in found)
    share = statistics.median(one["cpu_s"] / one["life_s"] for one in found)
    print(f"slower while doctor looks: {slower:.1%} (median of {len(found)}); cores in use by the sums: {share:.2f}")


if __name__ == "__main__":
    main()
