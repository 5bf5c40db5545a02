"""Runs side by side: policies times seeds, all on the very same traces; their figures, also as Markdown tables."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

import msgspec

from unicrond.replay.evaluation.model.assumptions import DEFAULTS, Assumptions
from unicrond.replay.evaluation.model.traces import Trace, trace
from unicrond.replay.evaluation.model.workload import Workload
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.simulator.simulator import SimulationOutcome, build_policy, published_ratio, simulate

#: Called after each run with: the number of completed runs, the number of all runs, the policy of this one.
ProgressCallback = Callable[[int, int, str], None]
Run: TypeAlias = tuple[Workload, Trace, str, Assumptions]
#: Outcomes of runs that need not be simulated again.
OutcomeCache: TypeAlias = dict[Run, SimulationOutcome]


@dataclass(frozen=True)
class PolicyRow:
    """One policy over all seeds, in the seeds' order. `published`: see `published_ratio`."""

    policy: str
    published: float | None
    outcomes: tuple[SimulationOutcome, ...]

    @property
    def ratio(self) -> float:
        """Return the WAF before the first fault over failure-free."""
        return self.outcomes[0].ratio

    @property
    def ettr(self) -> float:
        """Return the mean over seeds; see SimulationOutcome."""
        return fmean(outcome.ettr for outcome in self.outcomes)

    @property
    def goodput(self) -> float:
        """Return the mean over seeds; see SimulationOutcome."""
        return fmean(outcome.goodput for outcome in self.outcomes)

    def mean(self, part: str) -> float:
        """Return the mean over seeds of one part of RunCosts, as a share of failure-free."""
        return fmean(getattr(outcome.costs, part) / outcome.costs.failure_free for outcome in self.outcomes)

    @property
    def shares(self) -> list[float]:
        """List delivered over failure-free, per seed."""
        return [outcome.share for outcome in self.outcomes]

    @property
    def waf(self) -> float:
        """Return the accumulated WAF, mean over seeds, weighted FLOP."""
        return fmean(outcome.costs.delivered / 1e6 for outcome in self.outcomes)

    @property
    def stalled_h(self) -> float:
        """Sum the hours in which tasks did not train, over tasks; mean over seeds."""
        return fmean(outcome.costs.stalled_us / 3.6e9 for outcome in self.outcomes)

    @property
    def moves(self) -> float:
        """Count the nodes that began to work for another task, mean over seeds."""
        return fmean(outcome.costs.moves for outcome in self.outcomes)


@dataclass(frozen=True)
class Comparison:
    """The rows of all policies, in the order in which the caller named them."""

    workload: Workload
    trace: str
    seeds: tuple[int, ...]
    assumptions: Assumptions
    rows: tuple[PolicyRow, ...]

    def row(self, policy: str) -> PolicyRow:
        """Return the policy's row. Raises StopIteration where the comparison lacks it."""
        return next(row for row in self.rows if row.policy == policy)

    def gain_over(self, row: PolicyRow, base: str) -> tuple[float, float, float]:
        """Return the accumulated WAF of `base` over the row's on the same seeds as (least, mean, most); inf where the
        row has none."""
        gains = [
            base_share / row_share if row_share else float("inf")
            for base_share, row_share in zip(self.row(base).shares, row.shares, strict=True)
        ]
        return min(gains), fmean(gains), max(gains)


def compare(
    workload: Workload,
    trace_spec: str,
    policies: Sequence[str],
    seeds: Sequence[int],
    assumptions: Assumptions = DEFAULTS,
    *,
    progress: ProgressCallback | None = None,
    processes: int = 1,
    cache: OutcomeCache | None = None,
) -> Comparison:
    """Run every policy on every seed in so many processes, except what `cache` holds; its outcomes are added to
    `cache`.

    Raises TraceError, PolicyError, WorkloadError before the first run."""
    traces = [trace(trace_spec, workload.cluster.nodes, seed) for seed in seeds]
    for policy in policies:
        # Its tables are computed once here, not in each process.
        build_policy(policy, EvaluationWorld(workload, traces[0], assumptions))
    runs: list[Run] = [(workload, faults, policy, assumptions) for policy in policies for faults in traces]
    outcomes = _run_all(runs, {} if cache is None else cache, progress, processes)
    rows = [
        PolicyRow(
            policy, published_ratio(policy, assumptions), tuple(outcomes[nth * len(traces) : (nth + 1) * len(traces)])
        )
        for nth, policy in enumerate(policies)
    ]
    return Comparison(workload, trace_spec, tuple(seeds), assumptions, tuple(rows))


def _run_all(
    runs: Sequence[Run], cache: OutcomeCache, progress: ProgressCallback | None, processes: int
) -> list[SimulationOutcome]:
    """Return the outcomes in the order of `runs`."""
    new = [run for run in dict.fromkeys(runs) if run not in cache]

    def record(run: Run, outcome: SimulationOutcome) -> None:
        """Store the outcome of a run, and report the progress."""
        cache[run] = outcome
        if progress is not None:
            progress(len(runs) - sum(pending_run not in cache for pending_run in new), len(runs), outcome.policy)

    if processes == 1 or len(new) < 2:
        for run in new:
            record(run, simulate(*run))
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            pending = {pool.submit(simulate, *run): run for run in new}
            for future in as_completed(pending):
                record(pending[future], future.result())
    return [cache[run] for run in runs]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return plain values: shares of failure-free, weighted FLOP, hours; the identity's integers per seed as text."""
    return {
        "cluster": {"gpu": comparison.workload.cluster.gpu, "nodes": comparison.workload.cluster.nodes},
        "tasks": [msgspec.to_builtins(task) for task in comparison.workload.tasks],
        "trace": comparison.trace,
        "seeds": list(comparison.seeds),
        "assumptions": msgspec.to_builtins(comparison.assumptions),
        "rows": [_row_json(comparison, row) for row in comparison.rows],
    }


def _row_json(comparison: Comparison, row: PolicyRow) -> dict[str, Any]:
    parts = ("delivered", "detection", "transition", "sub_healthy")
    return {
        "policy": row.policy,
        "throughput_ratio": row.ratio,
        "published_throughput_ratio": row.published,
        "ettr": row.ettr,
        "goodput": row.goodput,
        "accumulated_waf_flop": row.waf,
        "share": {part: row.mean(part) for part in parts},
        "delivered_range": [min(row.shares), max(row.shares)],
        "stalled_task_hours": row.stalled_h,
        "moves": row.moves,
        "core": [_core_json(outcome) for outcome in row.outcomes if outcome.core is not None],
        "seeds": [
            {part: str(getattr(outcome.costs, part)) for part in (*parts, "failure_free")} for outcome in row.outcomes
        ],
    }


def _core_json(outcome: SimulationOutcome) -> dict[str, float]:
    """Return what the coordinator's core did and how long it took in one run (first to last fault, start excluded)."""
    core = outcome.core
    assert core is not None
    return {
        "faults": len(outcome.trace.faults),
        "events": core.events,
        "plans": core.plans,
        "memberships": core.memberships,
        "cpu_s": core.core_cpu_s,
        "run_cpu_s": core.cpu_s,
        "decision_ms": core.decide_ms,
        "plan_ms": core.solve_ms,
    }


HEADERS = (
    "policy", "T ratio", "WAF, EFLOP", "delivered %", "detection %", "transition %", "sub-healthy %", "ETTR %",
    "goodput %", "stalled h", "moves",
)  # fmt: skip


def cells(comparison: Comparison, row: PolicyRow, base: str) -> list[str]:
    """Return a row of the table: HEADERS, then how many times as good `base` is."""
    least, mean, most = comparison.gain_over(row, base)
    return [
        row.policy,
        f"{row.ratio:.2g}",
        f"{row.waf / 1e18:.4g}",
        f"{100 * row.mean('delivered'):.2f} ({100 * min(row.shares):.1f} to {100 * max(row.shares):.1f})",
        f"{100 * row.mean('detection'):.3f}",
        f"{100 * row.mean('transition'):.3f}",
        f"{100 * row.mean('sub_healthy'):.2f}",
        f"{100 * row.ettr:.2f}",
        f"{100 * row.goodput:.2f}",
        f"{row.stalled_h:.1f}",
        f"{row.moves:.0f}",
        f"{mean:.3f} ({least:.2f} to {most:.2f})",
    ]


def line(parts: Sequence[str]) -> str:
    """Format a row."""
    return "| " + " | ".join(parts) + " |"


def head(parts: Sequence[str]) -> str:
    """Format the headers; all columns but the first are right-aligned."""
    return line(parts) + "\n|---" + "|---:" * (len(parts) - 1) + "|"


def full_table(comparison: Comparison) -> str:
    """Format all figures of each policy, and how many times as good the first one is."""
    base = comparison.rows[0].policy
    rows = [line(cells(comparison, row, base)) for row in comparison.rows]
    return "\n".join([head((*HEADERS, f"{base} is better by")), *rows])


def gain_table(comparisons: Mapping[str, Comparison]) -> str:
    """Format how many times as good as each other policy the first one is, per column; its own share first."""
    first = next(iter(comparisons.values()))
    base = first.rows[0]
    rows = [head((f"{base.policy} is better by", "T ratio", *comparisons))]
    base_shares = (f"{100 * comparison.rows[0].mean('delivered'):.1f} %" for comparison in comparisons.values())
    rows.append(line([f"({base.policy} delivers)", f"{base.ratio:.2f}", *base_shares]))
    for nth, row in enumerate(first.rows[1:], start=1):
        gains = (gain(comparison, comparison.rows[nth], base.policy) for comparison in comparisons.values())
        rows.append(line([row.policy, f"{row.ratio:.2f}", *gains]))
    return "\n".join(rows)


def gain(comparison: Comparison, row: PolicyRow, base: str) -> str:
    """Format the mean gain of `base` over the row, and its range over seeds."""
    least, mean, most = comparison.gain_over(row, base)
    return f"{mean:.3f} ({least:.2f} to {most:.2f})"


def share_table(title: str, points: Sequence[str], comparisons: Sequence[Comparison]) -> str:
    """Format what each policy delivers at each point, % of failure-free."""
    names = [row.policy for row in comparisons[0].rows]
    rows = [head((f"{title}: delivered, % of failure-free", *names))]
    for point, comparison in zip(points, comparisons, strict=True):
        rows.append(line([point, *(f"{100 * row.mean('delivered'):.2f}" for row in comparison.rows)]))
    return "\n".join(rows)
