"""How the cost of planning grows with the workers n and the tasks m.

python -m tests.benchmarks.planning_growth [--plot docs/results/plots/planning_growth.png]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from tests.benchmarks.planning_clusters import cluster
from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning.situation import NodeLoss
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Planner

WORKERS = (128, 256, 512, 1024, 2048, 4096, 8192)
TASKS = (4, 8, 16, 32, 64, 128)


def least_ms(work: Callable[[], object], rounds: int = 7) -> float:
    """CPU milliseconds of the quickest round."""
    taken = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return min(taken) * 1e3


def point(workers: int, tasks: int, unit: int) -> tuple[float, float]:
    """CPU ms of one plan and of the whole table."""
    situation = cluster(workers, tasks, unit)
    problem = situation.after(NodeLoss("node0003"))
    return least_ms(lambda: solve(problem)), least_ms(lambda: Planner().refresh(situation))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", metavar="PNG", help="write a plot (needs matplotlib: the extra [plot])")
    plot = parser.parse_args().plot
    kernel.warm()
    lines: dict[str, dict[int, tuple[float, float]]] = {}
    for unit, granularity in ((1, "GPU"), (8, "node")):
        lines[f"n, 32 tasks, {granularity}"] = {n: point(n, 32, unit) for n in WORKERS}
        lines[f"m, 1,024 GPUs, {granularity}"] = {m: point(1024, m, unit) for m in TASKS}
    print("| over | size | one plan, ms | table, ms |\n|---|---:|---:|---:|")
    for over, points in lines.items():
        for size, (plan, table) in points.items():
            print(f"| {over} | {size:,} | {plan:.2f} | {table:.2f} |")
    if plot:
        draw(plot, lines)


def draw(path: str, lines: dict[str, dict[int, tuple[float, float]]]) -> None:
    """Two log-log panels: over n and over m."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for panel, over, label in ((panels[0], "n", "GPUs n (32 tasks)"), (panels[1], "m", "tasks m (1,024 GPUs)")):
        for name, points in lines.items():
            if not name.startswith(over):
                continue
            granularity, sizes = name.rpartition(", ")[2], list(points)
            colour = "tab:blue" if granularity == "GPU" else "tab:orange"
            panel.loglog(sizes, [t for _, t in points.values()], "o-", color=colour, label=f"table, {granularity}")
            panel.loglog(sizes, [p for p, _ in points.values()], "o--", color=colour, label=f"one plan, {granularity}")
        panel.set_xlabel(label)
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("CPU time, ms")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
