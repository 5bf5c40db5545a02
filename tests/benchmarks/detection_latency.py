"""How long from a fault until the log holds it, per method of detection; beside it plain torch.distributed.

    python -m tests.benchmarks.detection_latency --rounds 20

Everything is real: nats-server, coordinator, agents, Megatron-core training in three ranks. The faults are signals;
the time of a fault is taken by the wall clock just before it, the time of its detection is the log's receive time of
the event that says so, on the same machine.

    node loss     SIGSTOP of the agent          -> NodeLost
    process exit  SIGKILL of a worker           -> WorkerExited
    exception     raised by a signal's handler  -> ErrorReported
    hang          SIGSTOP of a worker           -> the last HangSuspected that the verdict needs
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from tests.integration.live import TASK, Live, live_cluster, members
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.local.dev import free_port

HERE = Path(__file__).parent
HEARTBEAT_S = 0.5
MICRO_BATCH_S = 0.1
MICRO_BATCHES = 12
PLAIN_TIMEOUT_S = 5.0
# As on a real cluster; a small cluster has more patience.
os.environ.setdefault("UNICRON_HANG_FLOOR_S", "1")


def now_us() -> int:
    return time.time_ns() // 1000


async def entries_after(cluster: Live, seq: int) -> list[dict[str, Any]]:
    url = f"{cluster.dev.url}/v1/events?after={seq}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        lines = (await response.text()).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


async def first_entry(cluster: Live, seq: int, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first recorded entry after `seq` whose event `holds`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for entry in await entries_after(cluster, seq):
            if "envelope" in entry and holds(entry["envelope"]["event"]):
                return entry
        await asyncio.sleep(0.1)
    raise TimeoutError("the fault was not detected within 60 s")


async def node_losses(rounds: int, directory: Path) -> list[float]:
    """Seconds from the stop of a node's agent to NodeLost. No task: it is the node that is judged."""
    found = []
    async with live_cluster(directory, nodes=3, workers=3, heartbeat_s=HEARTBEAT_S) as cluster:
        for number in range(rounds):
            name = cluster.dev.node_names[number % 3]
            up = await cluster.until(
                "all are up", lambda s: [n.status for n in s.nodes.values()] == [NodeStatus.UP] * 3
            )
            process = cluster.dev.agents[name].process
            assert process is not None
            await asyncio.sleep(1.0 + 0.037 * number)  # anywhere between two heartbeats
            at_us = now_us()
            process.send_signal(signal.SIGSTOP)
            lost = await first_entry(cluster, up.seq, lambda e, n=name: e["type"] == "NodeLost" and e["node"] == n)
            process.send_signal(signal.SIGCONT)
            found.append((lost["recorded_at_us"] - at_us) / 1e6)
    return found


async def worker_faults(rounds: int, directory: Path) -> tuple[dict[str, list[float]], float]:
    """Seconds per fault of a worker, and the median iteration."""
    found: dict[str, list[float]] = {"process exit": [], "exception": [], "hang": []}
    iterations: list[float] = []
    async with live_cluster(directory, nodes=3, workers=3, heartbeat_s=HEARTBEAT_S) as cluster:
        await cluster.submit(entry=str(HERE / "slow_gpt.py"), args=[str(MICRO_BATCH_S)], global_batch=MICRO_BATCHES)
        incidents = 0
        for number in range(rounds):
            for kind, signum in (
                ("process exit", signal.SIGKILL),
                ("exception", signal.SIGUSR1),
                ("hang", signal.SIGSTOP),
            ):
                state = await cluster.training(incidents, beyond=12 if kind == "hang" else 2)
                iterations.append(state.tasks[TASK].pace.iteration_us / 1e6)
                victim = members(state)[number % 3]
                await asyncio.sleep(0.03 * (number % 13))  # anywhere in an iteration
                at_us = now_us()
                os.kill(state.tasks[TASK].workers[victim].pid, signum)
                found[kind].append(await detected(cluster, state, kind, victim, at_us))
                incidents += 1
    return found, statistics.median(iterations)


async def detected(cluster: Live, state: ClusterState, kind: str, victim: str, at_us: int) -> float:
    if kind == "process exit":
        entry = await first_entry(cluster, state.seq, lambda e: e["type"] == "WorkerExited" and e["worker"] == victim)
        return float(entry["recorded_at_us"] - at_us) / 1e6
    if kind == "exception":
        told = lambda e: e["type"] == "ErrorReported" and e["worker"] == victim and e["kind"] == "exception"  # noqa: E731
        entry = await first_entry(cluster, state.seq, told)
        raised_us = int(entry["envelope"]["event"]["message"].rpartition(" ")[2])
        return float(entry["recorded_at_us"] - raised_us) / 1e6
    blamed = await cluster.until(
        "the hang is judged",
        lambda s: [i for i in (*s.incidents.values(), *s.closed_incidents) if i.worker == victim and i.kind == "hang"],
    )
    (incident,) = [
        i for i in (*blamed.incidents.values(), *blamed.closed_incidents) if i.worker == victim and i.kind == "hang"
    ]
    return (incident.detected_us - at_us) / 1e6


async def plain(kind: str) -> float:
    """Seconds until the last survivor of a plain group knows: after a SIGKILL, or a SIGSTOP, of rank 2."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.benchmarks.plain_group", str(PLAIN_TIMEOUT_S), str(free_port()),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, cwd=HERE.parents[1], start_new_session=True,
    )  # fmt: skip
    try:
        return await survivors_know(process, kind)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def survivors_know(process: asyncio.subprocess.Process, kind: str) -> float:
    assert process.stdout is not None
    pids: dict[int, int] = {}
    failed: list[int] = []
    at_us = 0
    while len(failed) < 2:
        word, rank, number = (await process.stdout.readline()).split()
        if word == b"pid":
            pids[int(rank)] = int(number)
            if len(pids) == 3:
                await asyncio.sleep(1.0)
                at_us = now_us()
                os.kill(pids[2], signal.SIGKILL if kind == "process exit" else signal.SIGSTOP)
        else:
            failed.append(int(number))
    return (max(failed) - at_us) / 1e6


def line(name: str, seconds: list[float], target: str, paper: str, without: str) -> str:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return (
        f"| {name} | {statistics.median(ordered):.4g} s | {p99:.4g} s | {ordered[0]:.4g} s | {len(ordered)} "
        f"| {target} | {paper} | {without} |"
    )


async def run(rounds: int) -> list[str]:
    """The table's lines; what was measured is told as it comes."""
    killed = [await plain("process exit") for _ in range(min(rounds, 5))]
    stopped = [await plain("hang") for _ in range(min(rounds, 3))]
    tell("plain, killed", killed)
    tell("plain, stopped", stopped)
    with tempfile.TemporaryDirectory(prefix="unicron-detection-") as name:
        directory = Path(name)
        (directory / "nodes").mkdir()
        (directory / "workers").mkdir()
        workers, iteration_s = await worker_faults(rounds, directory / "workers")
        for kind, seconds in workers.items():
            tell(kind, seconds)
        nodes = await node_losses(rounds, directory / "nodes")
        tell("node loss", nodes)
    silent = f"its time-out: {statistics.median(stopped):.3g} s with {PLAIN_TIMEOUT_S:g} s set, 1800 s by default"
    return [
        f"iterations of {iteration_s:.3f} s (median), heartbeats of {HEARTBEAT_S} s, load {os.getloadavg()[0]:.1f}",
        "| method | median | p99 | least | n | target | paper | plain torch.distributed |",
        "|---|---|---|---|---|---|---|---|",
        line("node loss", nodes, f"{2 * HEARTBEAT_S + 0.5:g} s", "5.6 s", silent),
        line("process exit", workers["process exit"], "0.1 s", "1.8 s", f"{statistics.median(killed):.3g} s"),
        line("exception", workers["exception"], "0.05 s", "0.3 s", "as process exit"),
        line("hang", workers["hang"], f"{3 * iteration_s + 0.2:.3g} s", "3 iterations", silent),
    ]


def tell(name: str, seconds: list[float]) -> None:
    print(f"{name}: {' '.join(f'{one:.4f}' for one in seconds)} (load {os.getloadavg()[0]:.1f})", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    print(*asyncio.run(run(parser.parse_args().rounds)), sep="\n")


if __name__ == "__main__":
    main()
