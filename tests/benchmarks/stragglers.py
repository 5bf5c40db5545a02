"""How soon a slow replica is told of, and how often one that is not slow.

    python -m tests.benchmarks.stragglers --rounds 3 --calm-s 3600 --out stragglers.jsonl
    python -m tests.benchmarks.stragglers --report stragglers.jsonl

Everything is real: nats-server, coordinator, agents, Megatron-core training in two or more replicas of one worker, some
half a second an iteration. One replica takes 10, 20 or 30 % longer for each micro-batch, by a busy loop or by sleeping
(`straggling_gpt.py`), from birth or from iteration LATER on; it must be told of within 50 iterations, and nobody else.
Calm runs slow nobody down: whoever is told of there is a false alarm, as is whoever is told of before his time.

Each run is a line of JSON in `--out`, to which later invocations add; the report sums them up. `--rounds 0` and
`--calm-s 0` leave a part out, `--when`, `--how` and `--percent` choose of the matrix.
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
from typing import Any

from tests.integration.live import Live, live_cluster
from unicrond.core.state.state import ClusterState, TaskStatus

ENTRY = Path(__file__).with_name("straggling_gpt.py")
PERCENT = (10, 20, 30)
WHENS = ("birth", "later")
HOWS = ("busy", "sleep")
#: Iterations that a straggler has until it must have been told of.
PROMPT = 50
#: The first slow iteration of those that are quick at first.
LATER = 46
#: What is told of the last iteration comes a moment after its commit.
_SETTLES_S = 0.5
_LOOK_AGAIN_S = 0.5


async def trained(live: Live, name: str, how: str, percent: int, first: int, micro_batches: int) -> None:
    await live.submit(
        name=name,
        entry=str(ENTRY),
        args=[how, str(percent), str(live.workers - 1), str(first)],
        model={"layers": 2, "hidden": 128, "heads": 4, "seq": 64, "vocab": 256},
        global_batch=4 * micro_batches * live.workers,
        micro_batch=4,
    )


async def ended(live: Live, name: str) -> None:
    await live.run("unicronctl", "--url", live.dev.url, "cancel", name)
    await live.until(f"{name} has ended", lambda s: not s.tasks[name].workers, may_fail=True)


def told(live: Live, after: int) -> list[dict[str, Any]]:
    return live.events("StragglerObserved", after=after)


async def reached(live: Live, name: str, iteration: int, until_s: float = float("inf")) -> ClusterState:
    """The state once the task has committed `iteration`, or the time is over."""
    while True:
        state, _ = await live.dev.state()
        task = state.tasks.get(name)
        if task is not None and (task.progress.iteration >= iteration or time.monotonic() > until_s):
            return state
        assert task is None or task.status is TaskStatus.ACTIVE, task.ending.reason
        await asyncio.sleep(_LOOK_AGAIN_S)


async def slow_run(live: Live, number: int, how: str, percent: int, when: str, micro_batches: int) -> dict[str, Any]:
    name, first = f"slow{number}", 1 if when == "birth" else LATER
    before, _ = await live.dev.state()
    await trained(live, name, how, percent, first, micro_batches)
    state = await reached(live, name, first + PROMPT)
    await asyncio.sleep(_SETTLES_S)
    slow = members_by_rank(state, name)[-1]
    seen = [event for event in told(live, before.seq) if event["iteration"] < first + PROMPT]
    right = [event for event in seen if event["straggler"] == slow and event["iteration"] >= first]
    run = {
        "how": how,
        "percent": percent,
        "when": when,
        "replicas": live.workers,
        "found": right[0]["iteration"] - first + 1 if right else None,
        "factor": right[0]["factor"] if right else None,
        "since": right[0]["since_iteration"] - first if right else None,
        "wrong": len([event for event in seen if event not in right]),
        "iterations": first + PROMPT,
        "iteration_ms": state.tasks[name].pace.iteration_us / 1000,
        "load": os.getloadavg()[0],
    }
    await ended(live, name)
    return run


def members_by_rank(state: ClusterState, name: str) -> list[str]:
    membership = state.tasks[name].membership
    assert membership is not None
    return [member.worker for member in membership.members]


async def calm_run(live: Live, number: int, seconds: float, micro_batches: int) -> dict[str, Any]:
    name = f"calm{number}"
    before, _ = await live.dev.state()
    await trained(live, name, "none", 0, 1, micro_batches)
    await reached(live, name, 1)
    begun_s = time.monotonic()
    state = await reached(live, name, 10**9, begun_s + seconds)
    took_s, alarms = time.monotonic() - begun_s, told(live, before.seq)
    await ended(live, name)
    return {
        "how": "none",
        "replicas": live.workers,
        "seconds": took_s,
        "iterations": state.tasks[name].progress.iteration,
        "iteration_ms": took_s * 1000 / max(1, state.tasks[name].progress.iteration),
        "alarms": [(event["iteration"], event["rank"], event["factor"]) for event in alarms],
        "load": os.getloadavg()[0],
    }


async def measure(chosen: argparse.Namespace, directory: Path) -> None:
    def keep(run: dict[str, Any]) -> None:
        print(json.dumps(run), flush=True)
        with chosen.out.open("a") as out:
            out.write(json.dumps(run) + "\n")

    async with live_cluster(directory, nodes=chosen.replicas, workers=chosen.replicas) as live:
        number = 0
        for _ in range(chosen.rounds):
            for when in chosen.when:
                for percent in chosen.percent:
                    for how in chosen.how:
                        number += 1
                        keep(await slow_run(live, number, how, percent, when, chosen.micro_batches))
        if chosen.calm_s:
            keep(await calm_run(live, number, chosen.calm_s, chosen.micro_batches))


def report(runs: list[dict[str, Any]]) -> list[str]:
    """The tables of docs/results/benchmarks.md."""
    lines = ["| replicas | slow by | from | found within 50 | iterations until reported | factor | others reported |"]
    lines.append("|---|---|---|---|---|---|---|")
    slow = [run for run in runs if run["how"] != "none"]
    for key in dict.fromkeys((run["replicas"], run["percent"], run["how"], run["when"]) for run in slow):
        replicas, percent, how, when = key
        same = [run for run in slow if (run["replicas"], run["percent"], run["how"], run["when"]) == key]
        found = sorted(run["found"] for run in same if run["found"] is not None)
        factors = [run["factor"] for run in same if run["found"] is not None]
        lines.append(
            f"| {replicas} | {percent} %, {how} | {when} | {len(found)} of {len(same)}"
            f" | {', '.join(map(str, found)) or '-'} | {f'{statistics.median(factors):.2f}' if factors else '-'}"
            f" | {sum(run['wrong'] for run in same)} |"
        )
    calm = [run for run in runs if run["how"] == "none"]
    for replicas in dict.fromkeys(run["replicas"] for run in calm):
        same = [run for run in calm if run["replicas"] == replicas]
        seconds, iterations = sum(run["seconds"] for run in same), sum(run["iterations"] for run in same)
        lines.append(
            f"calm, {replicas} replicas: {sum(len(run['alarms']) for run in same)} false alarms in"
            f" {seconds / 60:.0f} minutes, {iterations} iterations, {len(same)} runs"
        )
    if runs:
        milliseconds = statistics.median(run["iteration_ms"] for run in runs)
        loads = sorted(run["load"] for run in runs)
        lines.append(f"iterations of {milliseconds:.0f} ms (median), load {loads[0]:.1f} to {loads[-1]:.1f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of the matrix (3)")
    parser.add_argument("--when", nargs="+", choices=WHENS, default=WHENS)
    parser.add_argument("--how", nargs="+", choices=HOWS, default=HOWS)
    parser.add_argument("--percent", nargs="+", type=int, default=PERCENT)
    parser.add_argument("--calm-s", type=float, default=3600.0, help="seconds without a straggler (3600)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=16, help="of a replica in an iteration (16)")
    parser.add_argument("--out", type=Path, default=Path("stragglers.jsonl"))
    parser.add_argument("--report", type=Path, help="only sum up this file")
    chosen = parser.parse_args()
    if chosen.report is None:
        with tempfile.TemporaryDirectory(prefix="unicron-stragglers-") as directory:
            asyncio.run(measure(chosen, Path(directory)))
    found = (chosen.report or chosen.out).read_text().splitlines()
    print(*report([json.loads(line) for line in found]), sep="\n")


if __name__ == "__main__":
    main()
