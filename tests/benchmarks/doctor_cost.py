"""What `unicronctl doctor` costs nodes whose cores all train: their pace with it and without, and its CPU time.

    python -m tests.benchmarks.doctor_cost --rounds 5

A small cluster with a node for each core, the built-in GPT on all of them. Each round trains for a while, and as long
again while doctor looks, one look after the other; what happened in both is counted from the log's StepCommitted, in
iterations a second. `looks`: so many; `look_s`: the time of one; `cpu_s`: of the processes that summed in one, all
nodes together; `load`: of the machine. The looks are asked of the API: a client's own start is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from unicrond.ctl.client import Client
from unicrond.events.vocabulary import StepCommitted
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.local.dev import DevCluster, small_cluster

CALM_S = 15.0
_TASK = {
    "name": "big",
    "model": {"layers": 2, "hidden": 64, "heads": 2, "seq": 64},
    "global_batch": 12,
    "iterations": 1_000_000,
    "checkpoint": {"interval": 0, "memory_interval": 0},
}


def fork_servers() -> list[psutil.Process]:
    """Of this cluster, before anything sums: the parents of what will."""
    return [one for one in psutil.Process().children(recursive=True) if "unicrond.agents.fork_server" in one.cmdline()]


def ended_cpu_s(servers: list[psutil.Process]) -> float:
    """Of the fork servers' children that have ended: while no worker ends, of what has summed."""
    times = [one.cpu_times() for one in servers]
    return sum(one.children_user + one.children_system for one in times)


def look(client: Client) -> None:
    """Have the agents look, once."""
    seen = client.checks("gloo", 300.0)
    unsummed = {node: its["no_sums"] for node, its in seen["links"].items() if its["no_sums"]}
    troubles = [one["trouble"] for its in seen["links"].values() for one in its["sums"] if one["trouble"]]
    if not seen["pairs"] or seen["silent"] or unsummed or troubles:
        raise SystemExit(f"a node did not sum: {seen['silent'] or unsummed or troubles}")


def looks(client: Client, servers: list[psutil.Process]) -> tuple[int, float, float]:
    """For as long as without: how many, the seconds of one, the CPU seconds of one."""
    began_s, before_s, count = time.monotonic(), ended_cpu_s(servers), 0
    while time.monotonic() - began_s < CALM_S:
        look(client)
        count += 1
    return count, (time.monotonic() - began_s) / count, (ended_cpu_s(servers) - before_s) / count


def pace(client: Client, after: int, until: int) -> float:
    """Iterations a second between these entries of the log."""
    steps = [
        (entry.recorded_at_us, entry.envelope.event.last)
        for entry in client.entries(after, until)
        if isinstance(entry, RecordedEvent) and isinstance(entry.envelope.event, StepCommitted)
    ]
    (first_us, first), (last_us, last) = steps[0], steps[-1]
    return (last - first) / ((last_us - first_us) / 1e6)


async def measured(cluster: DevCluster, rounds: int) -> list[dict[str, float]]:
    client, found = Client(cluster.url), []
    await cluster.submit(_TASK)
    while (await cluster.state())[0].tasks["big"].progress.iteration < 50:  # noqa: ASYNC110
        await asyncio.sleep(0.2)

    servers = fork_servers()

    async def end() -> int:
        return int((await asyncio.to_thread(client.health))["seq"])

    for _ in range(rounds):
        began = await end()
        await asyncio.sleep(CALM_S)
        calm = await end()
        count, look_s, cpu_s = await asyncio.to_thread(looks, client, servers)
        ended = await end()
        without, beside = pace(client, began, calm), pace(client, calm, ended)
        found.append(
            {
                "without": without,
                "beside": beside,
                "looks": count,
                "look_s": look_s,
                "cpu_s": cpu_s,
                "load": os.getloadavg()[0],
            }
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
    cpu_s, look_s = (statistics.median(one[name] for one in found) for name in ("cpu_s", "look_s"))
    print(f"slower while doctor looks: {slower:.1%} (median of {len(found)})")
    print(f"a look takes {look_s:.2f} s, its sums {cpu_s:.2f} s of CPU")


if __name__ == "__main__":
    main()
