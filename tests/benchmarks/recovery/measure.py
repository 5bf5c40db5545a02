"""Measure cells: kill one rank in mid-iteration, again and again, and write down what became of it.

    python -m tests.benchmarks.recovery.measure --systems unicrond torchrun torchft --ranks 3 --repetitions 5 --rounds 2
    python -m tests.benchmarks.recovery.measure --systems unicrond unicrond-follow --ranks 3
    python -m tests.benchmarks.recovery.measure --systems unicrond --ranks 3 --faults node move --repetitions 5
    python -m tests.benchmarks.recovery.report

In each round the systems take turns, each started anew; results are appended to `--results`, a line of JSON for each
cell and round, so that cells can be measured singly and reported together. A cell that fails shows its logs and is left
out; the others are measured, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from tests.benchmarks.recovery import moves
from tests.benchmarks.recovery.cell import CALM_STEPS, OURS, SAMPLES, STEADY_STEPS, SYSTEMS, Cell
from tests.benchmarks.recovery.figures import NotYet, Recovery, budget, lost_ms, recovery, steady_ms
from tests.benchmarks.recovery.systems import START, default_peers
from tests.benchmarks.recovery.waiting import steady, until
from tests.benchmarks.recovery.witness import Line, Traces, now_us
from unicrond.agents.trainer.loop import corpus
from unicrond.local.dev import DevCluster

RESULTS = Path("bench-recovery.jsonl")


async def one_kill(traces: Traces, cell: Cell, directory: Path, process: str, delay_us: int) -> tuple[Line, Recovery]:
    """Have the process killed in mid-iteration, and wait until all is as before."""
    order = directory / "kill"
    order.with_suffix(".new").write_text(f"{process.rpartition('.')[2]} {delay_us}")
    order.with_suffix(".new").rename(order)

    def recovered() -> tuple[Line, Recovery]:
        killed = [line for line in traces.look() if line.word == "killed" and line.process == process]
        if not killed:
            raise NotYet
        return killed[0], recovery(traces.lines, killed[0], cell.micro_batches)

    return await until(f"a full step of {cell.system} after the kill of {process}", recovered)


async def kills(cell: Cell, data: Path, directory: Path, peers: Path) -> dict[str, Any]:
    """One cell: its recoveries, and the iterations between them."""
    random_numbers = random.Random(cell.seed)
    traces = Traces(directory)
    found: list[dict[str, Any]] = []
    deaths: list[Line] = []
    windows: list[tuple[int, int]] = []
    async with START[cell.system](cell, data, directory, peers) as running:
        since_us = now_us()
        for number in range(cell.repetitions):
            processes = await steady(traces, cell, since_us, STEADY_STEPS + random_numbers.randrange(10))
            windows.append((since_us, now_us()))
            delay_us = random_numbers.randrange(40_000)
            killed, result = await one_kill(traces, cell, directory, processes[number % cell.ranks], delay_us)
            stages = await unicrond_stages(running, traces, killed, result) if cell.system in OURS else {}
            deaths.append(killed)
            found.append({**asdict(result), "stages": stages})
            tell(cell, found[-1])
            since_us = now_us()
        await steady(traces, cell, since_us, STEADY_STEPS if found else CALM_STEPS)
        windows.append((since_us, now_us()))
    iterations_ms = steady_ms(traces.lines, windows)
    usual_ms = statistics.median(iterations_ms)
    for one, killed, (_, until_us) in zip(found, deaths, windows[1:], strict=True):
        one["lost_ms"] = lost_ms(traces.lines, killed, until_us, cell.micro_batches, usual_ms)
    return {"faults": found, "iterations_ms": [round(took, 2) for took in iterations_ms]}


async def unicrond_stages(
    cluster: DevCluster, traces: Traces, killed: Line, result: Recovery
) -> dict[str, tuple[float, float]]:
    """The budget; the log says what agent and coordinator did."""
    worker = killed.process.rpartition(".")[0]
    events = [(entry, entry["envelope"], event) for entry, event in await moves.logged(cluster, killed.at_us)]
    exited, envelope, _ = next(e for e in events if e[2]["type"] == "WorkerExited" and e[2]["worker"] == worker)
    decided = next(e[1] for e in events if e[2]["type"] == "MembershipDecided")
    logged = {
        "detect": envelope["observed_at_us"],
        "log": exited["recorded_at_us"],
        "decide": decided["observed_at_us"],
    }
    return budget(traces.lines, result, logged)


def tell(cell: Cell, found: dict[str, Any]) -> None:
    if "next_step_ms" not in found:
        return
    stages = " ".join(f"{stage} {ms:.1f}({spent:.1f})" for stage, (ms, spent) in found.get("stages", {}).items())
    print(
        f"{cell.system} {cell.ranks}: next {found['next_step_ms']:.0f} full {found['full_step_ms']:.0f} new"
        f" {found['new_step_ms']:.0f} other {found['other_ms']:.0f} ms, again {found['again']}"
        f" (survivors' {found['again_survivors']}), back {found['rolled_back']}, missing {found['missing']}; {stages}",
        file=sys.stderr,
        flush=True,
    )


async def measure(chosen: argparse.Namespace) -> list[str]:
    """The cells that failed."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        data = Path(scratch) / "stdlib"
        corpus.build(data)
        for turn in range(chosen.rounds):
            for ranks in chosen.ranks:
                for system in chosen.systems:
                    seed = random.Random(f"{chosen.seed} {turn} {ranks}").randrange(10**6)
                    cell = Cell(system, ranks, chosen.repetitions, seed, chosen.paced)
                    for fault in chosen.faults:
                        directory = Path(scratch) / f"{fault}-{system}-{ranks}-{turn}"
                        directory.mkdir()
                        try:
                            if fault == "none":
                                found = await kills(replace(cell, repetitions=0), data, directory, chosen.peers)
                            elif fault == "kill":
                                found = await kills(cell, data, directory, chosen.peers)
                            else:
                                found = await moves.MEASURE[fault](cell, data, directory)
                        except Exception:
                            traceback.print_exc()
                            show_logs(directory)
                            failed.append(directory.name)
                        else:
                            keep(chosen.results, cell, fault, found)
    return failed


def keep(results: Path, cell: Cell, fault: str, found: dict[str, Any]) -> None:
    line = {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "fault": fault,
        **asdict(cell),
        **found,
    }
    with results.open("a") as out:
        out.write(json.dumps(line) + "\n")


def show_logs(directory: Path) -> None:
    for log in sorted(directory.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["unicrond", "torchrun", "torchft"])
    parser.add_argument("--ranks", nargs="+", type=int, choices=SAMPLES, default=[*SAMPLES])
    parser.add_argument("--faults", nargs="+", choices=["kill", "none", *moves.MEASURE], default=["kill"])
    parser.add_argument("--repetitions", type=int, default=5, help="faults in each round (5)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each system (2)")
    parser.add_argument("--paced", type=float, default=0.0, metavar="S", help="a micro-batch lasts so long, asleep (0)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", type=Path, default=default_peers(), help="directory of the peers' python")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"appended to ({RESULTS})")
    if failed := asyncio.run(measure(parser.parse_args(arguments))):
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
