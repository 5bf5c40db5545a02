"""Many runs side by side: policies times seeds, each policy on the very same traces; and what is said of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

import msgspec

from replay.evaluation.assumptions import DEFAULTS, Assumptions
from replay.evaluation.simulator import Outcome, made, published_ratio, simulate
from replay.evaluation.traces import Trace, trace
from replay.evaluation.workload import Workload
from replay.evaluation.world import World

#: Told after each run: how many are done, of how many, and which it was.
Progress = Callable[[int, int, str], None]
Run: TypeAlias = tuple[Workload, Trace, str, Assumptions]
#: Outcomes of runs that need not be made again.
Known: TypeAlias = dict[Run, Outcome]


@dataclass(frozen=True)
class Row:
    """One policy over all seeds, in the seeds' order. `published`: see `published_ratio`."""

    policy: str
    published: float | None
    outcomes: tuple[Outcome, ...]

    @property
    def ratio(self) -> float:
        """WAF before the first fault over failure-free."""
        return self.outcomes[0].ratio

    @property
    def ettr(self) -> float:
        """Mean over seeds; see Outcome."""
        return fmean(outcome.ettr for outcome in self.outcomes)

    @property
    def goodput(self) -> float:
        """Mean over seeds; see Outcome."""
        return fmean(outcome.goodput for outcome in self.outcomes)

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
    """`rows` in the order asked for."""

    workload: Workload
    trace: str
    seeds: tuple[int, ...]
    assumptions: Assumptions
    rows: tuple[Row, ...]

    def row(self, policy: str) -> Row:
        """The policy's row."""
        return next(row for row in self.rows if row.policy == policy)

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
    processes: int = 1,
    known: Known | None = None,
) -> Comparison:
    """Run everything that is not `known`, in so many processes; it is known afterwards.

    Raises TraceError, PolicyError, WorkloadError before the first run.
    """
    traces = [trace(trace_spec, workload.cluster.nodes, seed) for seed in seeds]
    for policy in policies:
        made(policy, World(workload, traces[0], assumptions))  # its tables are computed once, not in each process
    asked: list[Run] = [(workload, on, policy, assumptions) for policy in policies for on in traces]
    outcomes = _all(asked, {} if known is None else known, progress, processes)
    rows = [
        Row(policy, published_ratio(policy, assumptions), tuple(outcomes[nth * len(traces) : (nth + 1) * len(traces)]))
        for nth, policy in enumerate(policies)
    ]
    return Comparison(workload, trace_spec, tuple(seeds), assumptions, tuple(rows))


def _all(asked: Sequence[Run], known: Known, progress: Progress | None, processes: int) -> list[Outcome]:
    """The outcomes, in the order asked for."""
    new = [run for run in dict.fromkeys(asked) if run not in known]

    def done(run: Run, outcome: Outcome) -> None:
        known[run] = outcome
        if progress is not None:
            progress(len(asked) - sum(each not in known for each in new), len(asked), outcome.policy)

    if processes == 1 or len(new) < 2:
        for run in new:
            done(run, simulate(*run))
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            pending = {pool.submit(simulate, *run): run for run in new}
            for future in as_completed(pending):
                done(pending[future], future.result())
    return [known[run] for run in asked]


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


def _core_json(outcome: Outcome) -> dict[str, float]:
    """What the coordinator's core did and took in one run (first to last fault, start excluded)."""
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
        f"{100 * row.ettr:.2f}",
        f"{100 * row.goodput:.2f}",
        f"{row.stalled_h:.1f}",
        f"{row.moves:.0f}",
        f"{mean:.3f} ({least:.2f} to {most:.2f})",
    ]
