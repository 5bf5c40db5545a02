"""How much of what a slow replica costs is cut by dealing micro-batches by speed, beside the integer optimum.

    python -m tests.benchmarks.dealing --replicas 3 4 6 --factors 1.1 1.3 2 4 --out dealing.jsonl
    python -m tests.benchmarks.dealing --report dealing.jsonl

Real workers, sockets and messages, without a coordinator (`tests/integration/regroup_rig.py`). Each micro-batch takes
MS milliseconds (`tests/integration/paced_gpt.py`: a small GPT, and sleep; with `--how busy` a busy loop), those of one
replica FACTOR times as long, from birth or from iteration LATER on. What can be cut at all depends on the micro-batches
of a replica: with four, nothing of 1.1. `optimum`: the longest of the replicas' computing times in the best deal of
whole micro-batches, at least one each, found by trying all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.integration.regroup_rig import ForkServer, Rig
from tests.integration.test_dealing import ENTRY
from tests.integration.test_regroup import begin, complete, task
from unicrond.agents.protocol.messages import IterationCommitted
from unicrond.agents.trainer.loop import corpus
from unicrond.events.vocabulary import StragglerObserved

#: The first slow iteration of a replica that is quick at first, and for how many iterations it is watched.
LATER, WATCHED = 31, 60
#: The last iterations, of which the median counts.
LAST = 20


def optimum(factor: float, replicas: int, micro_batches: int) -> float:
    """The shortest time of an iteration's micro-batches, in those of an ordinary replica, by trying all shares of the
    slow one."""
    return min(
        max(slow * factor, -(-(micro_batches - slow) // (replicas - 1))) for slow in range(1, micro_batches // 2 + 1)
    )


def measure(
    server: ForkServer, directory: Path, data: Path, replicas: int, each: int, factor: float, when: str, how: str,
    base_ms: float,
) -> dict[str, Any]:  # fmt: skip
    first = 1 if when == "birth" else LATER
    spec = task(
        data, entry=ENTRY, args=[*map(str, (base_ms, factor, replicas // 2, first, 10**6)), how], max_workers=replicas,
        global_batch=each * replicas, iterations=first + WATCHED,
    )  # fmt: skip
    workers = [f"t.{number + 1}" for number in range(replicas)]
    with Rig(server, directory, spec) as run:
        begin(run, *workers)
        complete(run)
        commits = run.iterations()
        events = run.of(StragglerObserved)
    slow = [commits[number] for number in commits if number > first]
    even = [commit for commit in slow if set(commit.micro_batches_by_rank) == {each}]
    moved = next((commit.iteration for commit in slow if commit not in even), None)
    wall_ms = _milliseconds(slow[-LAST:])
    overhead_ms = _milliseconds(even[3:]) - each * factor * base_ms
    return {
        "replicas": replicas, "each": each, "factor": factor, "when": when, "how": how, "base_ms": base_ms,
        "even_ms": _milliseconds(even[3:]), "ms": wall_ms, "overhead_ms": overhead_ms,
        "optimum_ms": optimum(factor, replicas, each * replicas) * base_ms + overhead_ms,
        "counts": slow[-1].micro_batches_by_rank, "after": None if moved is None else moved - first,
        "told": [event.sentence() for event in events][-1:], "load": os.getloadavg()[0],
    }  # fmt: skip


def _milliseconds(commits: list[IterationCommitted]) -> float:
    return statistics.median(commit.duration_us for commit in commits) / 1000


def report(runs: list[dict[str, Any]]) -> list[str]:
    """The table of docs/results/benchmarks.md."""
    lines = [
        "| replicas, micro-batches each | slow by | from | dealt even, ms | now, ms | optimum, ms | of it cut |"
        " dealt, after iterations |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for run in runs:
        possible_ms = run["even_ms"] - run["optimum_ms"]
        cut = f"{100 * (run['even_ms'] - run['ms']) / possible_ms:.0f} %" if possible_ms > 0.01 * run["ms"] else "-"
        after = "-" if run["after"] is None else f"{', '.join(map(str, run['counts']))}; {run['after']}"
        lines.append(
            f"| {run['replicas']}, {run['each']} | {run['factor']:g}, {run['how']} | {run['when']} |"
            f" {run['even_ms']:.0f} | {run['ms']:.0f} | {run['optimum_ms']:.0f} | {cut} | {after} |"
        )
    above = [run["ms"] / run["optimum_ms"] - 1 for run in runs]
    lines.append(f"above the optimum: at most {100 * max(above):.1f} %, median {100 * statistics.median(above):.1f} %")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[3, 4, 6])
    parser.add_argument("--each", type=int, nargs="+", default=[4, 16], help="micro-batches of a replica (4, 16)")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.1, 1.3, 2.0, 4.0])
    parser.add_argument("--when", nargs="+", choices=("birth", "later"), default=["birth", "later"])
    parser.add_argument("--how", choices=("sleep", "busy"), default="sleep")
    parser.add_argument("--ms", type=float, default=40.0, help="of an ordinary micro-batch (40)")
    parser.add_argument("--out", type=Path, default=Path("dealing.jsonl"))
    parser.add_argument("--report", type=Path, help="only sum up this file")
    options = parser.parse_args()
    if options.report is None:
        with tempfile.TemporaryDirectory(prefix="unicron-dealing-") as name, ForkServer() as server:
            data = Path(name) / "stdlib"
            corpus.build(data)
            for replicas in options.replicas:
                for each in options.each:
                    for factor in options.factors:
                        for when in options.when:
                            run = measure(
                                server, Path(name), data, replicas, each, factor, when, options.how,
                                options.ms * min(1, 4 / each),
                            )  # fmt: skip
                            print(json.dumps(run), flush=True)
                            with options.out.open("a") as out:
                                out.write(json.dumps(run) + "\n")
    lines = (options.report or options.out).read_text().splitlines()
    print(*report([json.loads(line) for line in lines]), sep="\n")


if __name__ == "__main__":
    main()
