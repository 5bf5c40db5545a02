"""What a study runs with: seeds, processes, and the outcomes that earlier studies have computed already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from unicrond.replay.evaluation.model.assumptions import DEFAULTS, Assumptions
from unicrond.replay.evaluation.model.workload import Workload
from unicrond.replay.evaluation.studies import plots
from unicrond.replay.evaluation.studies.comparison import Comparison, OutcomeCache, compare

PLOTS = Path("docs/results/plots")


@dataclass(frozen=True)
class Bench:
    """The settings that all studies share. `progress` is called after each run; `trace_file`: the real trace, None if
    it is not here; `cache`: outcomes so far, so that equal runs are simulated once."""

    seeds: range
    progress: Callable[[int, int, str], None]
    trace_file: Path | None
    processes: int = 1
    cache: OutcomeCache = field(default_factory=dict)

    def run(
        self, work: Workload, spec: str, policies: Sequence[str], assumptions: Assumptions = DEFAULTS, seeds: int = 0
    ) -> Comparison:
        """Compare `policies` on the trace that `spec` names. `seeds`: fewer than the bench's, where one run is long; 0:
        all."""
        few = self.seeds[: seeds or len(self.seeds)]
        return compare(
            work, spec, policies, few, assumptions, progress=self.progress, processes=self.processes, cache=self.cache
        )


def plot_shares(comparisons: Sequence[Comparison], x_label: str, x: Sequence[float], name: str, title: str) -> None:
    """Plot the share of failure-free that each policy delivers over `x`, into PLOTS/`name`.png."""
    series = {
        row.policy: [100 * fmean(comparison.rows[nth].shares) for comparison in comparisons]
        for nth, row in enumerate(comparisons[0].rows)
    }
    plots.lines(title, x_label, "delivered, % of failure-free", x, series, PLOTS / f"{name}.png", logarithmic=True)
