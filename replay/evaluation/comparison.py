"""Many runs side by side: policies times seeds, each policy on the very same traces; and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

from replay.evaluation.assumptions import DEFAULTS, Assumptions
from replay.evaluation.simulator import Outcome, published_ratio, simulate
from replay.evaluation.traces import trace
from replay.evaluation.workload import Workload

#: Told after each run: how many are done, of how many, and which it was.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Row:
    """One policy over all seeds, in the seeds' order. `ratio`: failure-free throughput over Megatron's."""

    policy: str
    ratio: float
    outcomes: tuple[Outcome, ...]

    def mean(self, part: str) -> float:
        """Mean over seeds of one of Costs' parts, as a share of failure-free."""
        return fmean(getattr(outcome.costs, part) / outcome.costs.failure_free for outcome in self.outcomes)

    @property
    def shares(self) -> list[float]:
        """Delivered over failure-free, per seed."""
        return [outcome.share for outcome in self.outcomes]

    @property
    def waf(self) -> float:
        """Accumulated WAF, mean over seeds, weighted FLOP."""
        return fmean(outcome.costs.delivered / 1e6 for outcome in self.outcomes)

    @property
    def stalled_h(self) -> float:
        """Hours that tasks did not train, summed over tasks, mean over seeds."""
        return fmean(outcome.costs.stalled_us / 3.6e9 for outcome in self.outcomes)

    @property
    def moves(self) -> float:
        """Nodes that began to work for another task, mean over seeds."""
        return fmean(outcome.costs.moves for outcome in self.outcomes)


@dataclass(frozen=True)
class Comparison:
    """`rows` in the order asked for; those of systems slower than Megatron come again at ratio 1.0."""

    workload: Workload
    trace: str
    seeds: tuple[int, ...]
    assumptions: Assumptions
    rows: tuple[Row, ...]

    def row(self, policy: str, ratio: float | None = None) -> Row:
        """The first row of the policy (at that ratio)."""
        return next(row for row in self.rows if row.policy == policy and ratio in (None, row.ratio))

    def gain_over(self, row: Row, base: str) -> tuple[float, float, float]:
        """Accumulated WAF of `base` over the row's on the same seeds: (least, mean, most); inf if it has none."""
        gains = [
            mine / theirs if theirs else float("inf")
            for mine, theirs in zip(self.row(base).shares, row.shares, strict=True)
        ]
        return min(gains), fmean(gains), max(gains)


def compare(
    workload: Workload,
    trace_spec: str,
    policies: Sequence[str],
    seeds: Sequence[int],
    assumptions: Assumptions = DEFAULTS,
    *,
    progress: Progress | None = None,
) -> Comparison:
    """Run everything. Raises TraceError, PolicyError, WorkloadError before the first run."""
    traces = [trace(trace_spec, workload.cluster.nodes, seed) for seed in seeds]
    asked = [(policy, published_ratio(policy, assumptions)) for policy in policies]
    asked += [(policy, 1.0) for policy, ratio in asked if ratio != 1.0]
    rows = []
    for index, (policy, ratio) in enumerate(asked):
        outcomes = []
        for nth, on in enumerate(traces):
            outcomes.append(simulate(workload, on, policy, assumptions, ratio=ratio))
            if progress is not None:
                progress(index * len(traces) + nth + 1, len(asked) * len(traces), policy)
        rows.append(Row(policy, ratio, tuple(outcomes)))
    return Comparison(workload, trace_spec, tuple(seeds), assumptions, tuple(rows))


def as_json(made: Comparison) -> dict[str, Any]:
    """Plain values: shares of failure-free, weighted FLOP, hours; the identity's integers per seed as text."""
    return {
        "cluster": {"gpu": made.workload.cluster.gpu, "nodes": made.workload.cluster.nodes},
        "tasks": [msgspec.to_builtins(task) for task in made.workload.tasks],
        "trace": made.trace,
        "seeds": list(made.seeds),
        "assumptions": msgspec.to_builtins(made.assumptions),
        "rows": [_row_json(made, row) for row in made.rows],
    }


def _row_json(made: Comparison, row: Row) -> dict[str, Any]:
    parts = ("delivered", "detection", "transition", "sub_healthy")
    return {
        "policy": row.policy,
        "throughput_ratio": row.ratio,
        "accumulated_waf_flop": row.waf,
        "share": {part: row.mean(part) for part in parts},
        "delivered_range": [min(row.shares), max(row.shares)],
        "stalled_task_hours": row.stalled_h,
        "moves": row.moves,
        "seeds": [
            {part: str(getattr(outcome.costs, part)) for part in (*parts, "failure_free")} for outcome in row.outcomes
        ],
    }


HEADERS = (
    "policy", "T ratio", "WAF, EFLOP", "delivered %", "detection %", "transition %", "sub-healthy %", "stalled h",
    "moves",
)  # fmt: skip


def cells(made: Comparison, row: Row, base: str) -> list[str]:
    """A row of the table: HEADERS, then how many times `base` is as good."""
    least, mean, most = made.gain_over(row, base)
    return [
        row.policy,
        f"{row.ratio:.2g}",
        f"{row.waf / 1e18:.4g}",
        f"{100 * row.mean('delivered'):.2f} ({100 * min(row.shares):.1f} to {100 * max(row.shares):.1f})",
        f"{100 * row.mean('detection'):.3f}",
        f"{100 * row.mean('transition'):.3f}",
        f"{100 * row.mean('sub_healthy'):.2f}",
        f"{row.stalled_h:.1f}",
        f"{row.moves:.0f}",
        f"{mean:.3f} ({least:.2f} to {most:.2f})",
    ]
