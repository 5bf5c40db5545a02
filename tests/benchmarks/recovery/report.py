"""Tables and a plot from the measured cells.

python -m tests.benchmarks.recovery.report --results bench-recovery.jsonl --plot recovery.png
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.recovery.cell import OURS, SYSTEMS
from tests.benchmarks.recovery.figures import STAGES
from tests.benchmarks.recovery.measure import RESULTS

Rows = list[dict[str, Any]]
_COLOURS = {"unicrond": "#1b6ca8", "unicrond-follow": "#7fb3d5", "torchrun": "#b0b0b0", "torchft": "#e08e45"}


def cells(rows: Rows, fault: str, **wanted: object) -> Rows:
    return [row for row in rows if row["fault"] == fault and all(row[key] == value for key, value in wanted.items())]


def faults(rows: Rows) -> Rows:
    return [fault for row in rows for fault in row["faults"]]


def spread(values: Iterable[float], digits: int = 0) -> str:
    """Median (least to greatest)."""
    ordered = sorted(values)
    if not ordered:
        return ""
    low, middle, high = ordered[0], statistics.median(ordered), ordered[-1]
    if low == high:
        return f"{middle:,.{digits}f}"
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    aligned = ["---" if not number else "---:" for number in range(len(head))]
    return [f"| {' | '.join(line)} |" for line in (head, aligned, *lines)]


def kill_table(rows: Rows, paced_s: float) -> list[str]:
    head = (
        "ranks, system", "faults", "next step, ms", "next step at the full batch, ms", "computed again",
        "of it a survivor's", "micro-batches missing", "steps back", "lost in all, ms", "iteration, ms",
    )  # fmt: skip
    lines = []
    for ranks in sorted({row["ranks"] for row in rows}):
        for system in SYSTEMS:
            mine = cells(rows, "kill", ranks=ranks, system=system, paced_s=paced_s)
            if not (found := faults(mine)):
                continue

            def of(key: str, found: Rows = found) -> str:
                return spread(fault[key] for fault in found)

            steady = [took for row in mine for took in row["iterations_ms"]]
            lines.append(
                (
                    *(f"{ranks}, {system}", str(len(found)), of("next_step_ms"), of("full_step_ms"), of("again")),
                    *(
                        of("again_survivors"),
                        of("missing"),
                        of("rolled_back"),
                        of("lost_ms"),
                        f"{statistics.median(steady):.0f}",
                    ),
                )
            )
    return table(head, lines)


def budget_table(rows: Rows, paced_s: float, system: str) -> list[str]:
    """Medians by stage; what of it was training compute."""
    counts = sorted({row["ranks"] for row in cells(rows, "kill", system=system, paced_s=paced_s)})
    found = {ranks: faults(cells(rows, "kill", system=system, ranks=ranks, paced_s=paced_s)) for ranks in counts}

    def line(name: str, value: Callable[[dict[str, Any]], float]) -> tuple[str, ...]:
        return (name, *(spread((value(fault) for fault in found[ranks]), 1) for ranks in counts))

    lines = [line(stage, lambda f, s=stage: f["stages"][s][0] - f["stages"][s][1]) for stage in STAGES]  # type: ignore[misc]
    lines += [
        line("**all that is not computing**", lambda f: sum(all_ms - own for all_ms, own in f["stages"].values())),
        line("computing", lambda f: sum(own for _, own in f["stages"].values())),
        line("together", lambda f: sum(all_ms for all_ms, _ in f["stages"].values())),
    ]
    return table(("stage", *(f"{ranks} ranks, ms" for ranks in counts)), lines)


def moves_table(rows: Rows, paced_s: float) -> list[str]:
    lines = []
    for row_key, fault, key in (
        ("node loss: kill to NodeLost in the log", "node", "detected_ms"),
        ("node loss: kill to the next step, at the full batch", "node", "next_step_ms"),
        ("move out: submission to the second task's first step", "move", "out_ms"),
        ("move out: the first task's longest iteration, beyond its usual one", "move", "stall_ms"),
        ("move back: the second task's end to the first step of the new worker", "move", "back_ms"),
        ("move back: the first task's longest iteration, beyond its usual one", "move", "stall_back_ms"),
    ):
        found = faults(cells(rows, fault, paced_s=paced_s))
        if found:
            lines.append((row_key, str(len(found)), spread(one[key] for one in found)))
    return table(("what", "times", "ms"), lines)


def plot(rows: Rows, path: Path) -> None:
    """Next step, and next step at the full batch, by system and ranks, of real compute: every fault a dot."""
    from matplotlib import pyplot

    rows = cells(rows, "kill", paced_s=0.0)
    counts = sorted({row["ranks"] for row in rows})
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    titles = ("next_step_ms", "kill to the next step"), ("full_step_ms", "kill to the next step at the full batch")
    for axis, (key, title) in zip(axes, titles, strict=True):
        for place, system in enumerate(SYSTEMS):
            for number, ranks in enumerate(counts):
                values = [fault[key] / 1e3 for fault in faults(cells(rows, "kill", ranks=ranks, system=system))]
                xs = [number + 0.25 * (place - 1)] * len(values)
                label = system if number == 0 else None
                axis.scatter(xs, values, s=14, alpha=0.7, color=_COLOURS[system], label=label)
        axis.set_yscale("log")
        axis.set_xticks(range(len(counts)), [str(ranks) for ranks in counts])
        axis.set_xlabel("ranks")
        axis.set_title(title)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("seconds")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        lines = chosen.results.read_text().splitlines()
    except OSError as error:
        print(f"--results: {chosen.results}: {error.strerror}; measure first, or name another file", file=sys.stderr)
        raise SystemExit(2) from None
    rows: Rows = [json.loads(line) for line in lines]
    for paced_s in sorted({row["paced_s"] for row in rows}):
        print(f"\npaced {paced_s} s" if paced_s else "\nreal compute")
        print(*kill_table(rows, paced_s), "", sep="\n")
        for system in OURS:
            if cells(rows, "kill", system=system, paced_s=paced_s):
                print(f"{system}:", "", *budget_table(rows, paced_s, system), "", sep="\n")
        print(*moves_table(rows, paced_s), sep="\n")
    if chosen.plot:
        plot(rows, chosen.plot)


if __name__ == "__main__":
    main()
