"""What a study is run with: seeds, processes, and the runs that other studies have made already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from replay.evaluation import plots
from replay.evaluation.assumptions import DEFAULTS, Assumptions
from replay.evaluation.comparison import Comparison, Known, compare
from replay.evaluation.workload import Workload

PLOTS = Path("docs/results/plots")


@dataclass(frozen=True)
class Bench:
    """`trace_file`: the real trace, None = not here. `known`: outcomes so far; equal runs are made once."""

    seeds: range
    told: Callable[[int, int, str], None]
    trace_file: Path | None
    processes: int = 1
    known: Known = field(default_factory=dict)

    def run(
        self, work: Workload, spec: str, policies: Sequence[str], assumed: Assumptions = DEFAULTS, seeds: int = 0
    ) -> Comparison:
        """`seeds`: fewer than the bench's, where one run is long."""
        few = self.seeds[: seeds or len(self.seeds)]
        return compare(
            work, spec, policies, few, assumed, progress=self.told, processes=self.processes, known=self.known
        )


def plot_shares(made: Sequence[Comparison], x_label: str, x: Sequence[float], name: str, title: str) -> None:
    """What each policy delivers over `x`."""
    series = {row.policy: [100 * fmean(each.rows[nth].shares) for each in made] for nth, row in enumerate(made[0].rows)}
    plots.lines(title, x_label, "delivered, % of failure-free", x, series, PLOTS / f"{name}.png", logarithmic=True)
