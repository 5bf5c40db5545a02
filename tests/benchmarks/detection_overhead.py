"""What detection costs where nothing fails: iterations with all of it beside iterations without, taken in turns.

    python -m tests.benchmarks.detection_overhead --iterations 1000

Two replicas train a GPT; every other iteration has no marks, no statistics, no norms and no checksums
(`detection_gpt.py`). Compared are neighbouring iterations of one process, all of them. Told is the mean difference over
the median iteration without, and its 95 % interval (normal, over the pairs). CPU time is the process's own; wall time
holds what others do to the machine, so for it the same is told of windows as well: of the mean difference in each 25
pairs, with a checksum each, the median, and its interval (by order statistics, whatever the distribution).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from pathlib import Path

from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.agents.trainer.loop import corpus
from unicrond.events.vocabulary import CheckpointSpec, ModelSpec, TaskSpec

WORKERS = ("t.1", "t.2")
WARM_UP = 40
#: Pairs of a window: parameters are summed up every 50 iterations, so each window has one of those.
WINDOW = 25


def train(iterations: int, directory: Path) -> list[tuple[int, str, float, float]]:
    """(iteration, ON or OFF, wall seconds, CPU seconds) of both workers, without the first ones."""
    prefix = directory / "stdlib"
    corpus.build(prefix)
    spec = TaskSpec(
        name="t",
        entry=str(Path(__file__).with_name("detection_gpt.py")),
        args=(str(directory),),
        model=ModelSpec(layers=4, hidden=128, heads=4, seq=64),
        data=str(prefix),
        global_batch=16,
        iterations=10**6,
        checkpoint=CheckpointSpec(dir="(the rig says)", interval=0),
    )
    with ForkServer() as server, Rig(server, directory, spec) as rig:
        rig.start(*WORKERS)
        rig.until(lambda: rig.ready(*WORKERS), 60)
        rig.tell(1, WORKERS)
        rig.until(lambda: rig.reached(WARM_UP + iterations + 1), 3600)
        rig.quit(*WORKERS)
        rig.until(lambda: not rig.living())
    rows = []
    for worker in WORKERS:
        for words in map(str.split, (directory / worker).read_text().splitlines()):
            iteration, which, wall, cpu = words
            if WARM_UP < int(iteration) <= WARM_UP + iterations:
                rows.append((int(iteration), which, float(wall), float(cpu)))
    return rows


def compare(rows: list[tuple[int, str, float, float]], column: int) -> tuple[float, list[float]]:
    """(seconds without, the pairs' relative differences)."""
    pairs = []
    for first, second in zip(rows[::2], rows[1::2], strict=False):
        if second[0] == first[0] + 1:
            by = {first[1]: first[column], second[1]: second[column]}
            pairs.append((by["ON"], by["OFF"]))
    without = statistics.median(off for _, off in pairs)
    return without, [(on - off) / without for on, off in pairs]


def of_mean(differences: list[float]) -> tuple[float, float, float]:
    """The mean and its 95 % interval."""
    half = 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
    mean = statistics.mean(differences)
    return mean, mean - half, mean + half


def of_median(differences: list[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval: order statistics at 0.98 square roots from the middle."""
    ordered, reach = sorted(differences), 0.98 * len(differences) ** 0.5
    low, high = (len(ordered) - 1) / 2 - reach, (len(ordered) - 1) / 2 + reach
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[max(0, math.floor(low))], ordered[min(last, math.ceil(high))]


def run(iterations: int) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="unicron-overhead-") as name:
        rows = train(iterations, Path(name))
    found = []

    def tell(label: str, without: float, of: tuple[float, float, float], number: int) -> None:
        middle, low, high = (f"{100 * value:+.2f}" for value in of)
        found.append(f"| {label} | {without * 1e3:.1f} ms | {middle} % | {low} ... {high} % | {number} |")

    lead = rows[: len(rows) // len(WORKERS)]  # the workers go in step: their wall times are one and the same
    without, differences = compare(rows, 3)
    tell("CPU, mean of pairs", without, of_mean(differences), len(differences))
    without, differences = compare(lead, 2)
    tell("wall, mean of pairs", without, of_mean(differences), len(differences))
    windows = [statistics.mean(window) for window in zip(*[iter(differences)] * WINDOW, strict=False)]
    tell("wall, median of windows", without, of_median(windows), len(windows))
    return [
        f"load {os.getloadavg()[0]:.1f}",
        "| time | iteration without | difference | 95 % interval | of |",
        "|---|---|---|---|---|",
        *found,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    print(*run(parser.parse_args().iterations), sep="\n")


if __name__ == "__main__":
    main()
