"""Weighted achieved FLOP/s (WAF): what a cluster is worth, in integers (paper, section "plan generation").

T(t, x) is the achieved FLOP/s of task t on x workers; F(t, x) = weight * T(t, x), and 0 below the
task's minimum. Where the task file gives no table, T is linear.
"""

from __future__ import annotations

from functools import lru_cache

from events.vocabulary import TaskSpec
from unicrond.planning.problem import Curve
from unicrond.state import Task

#: FLOP/s of one worker where nothing is known: only ratios matter then.
LINEAR_FLOPS = 10**9


def throughput(spec: TaskSpec) -> Curve:
    """T(0..max_workers), FLOP/s. Counts that are no multiple of tp * pp are worth 0.

    A table in the task file counts as given; between its entries the next smaller one holds.
    """
    return _curve(spec.max_workers, spec.replica_workers, tuple(spec.throughput.items()))


@lru_cache(maxsize=4096)
def _curve(max_workers: int, unit: int, table: tuple[tuple[str, int], ...]) -> Curve:
    known = sorted((int(workers), flops) for workers, flops in table)
    points: dict[int, int] = {}
    below, flops = 0, 0
    for workers in range(unit, max_workers + 1, unit):
        while below < len(known) and known[below][0] <= workers:
            flops = known[below][1]
            below += 1
        points[workers] = flops if table else workers * LINEAR_FLOPS
    return Curve(points)


def waf(spec: TaskSpec, workers: int) -> int:
    """F(t, workers), weighted FLOP/s."""
    if workers < spec.min_workers or workers > spec.max_workers:
        return 0
    return int(spec.weight * throughput(spec)(workers))


def iteration_flop(spec: TaskSpec) -> int:
    """Model FLOP of one iteration, forward and backward: 6 * parameters * tokens + attention.

    Formula: Narayanan et al. 2021 (arXiv 2104.04473), equation 3, without recomputation.
    """
    m = spec.model
    tokens = spec.global_batch * m.seq
    per_token = 72 * m.layers * m.hidden**2 + 12 * m.layers * m.hidden * m.seq + 6 * m.hidden * m.vocab
    return tokens * per_token


def delivered_flop(task: Task) -> int:
    """Weighted model FLOP that the task has committed (iterations rolled back count once)."""
    return int(task.spec.weight * iteration_flop(task.spec) * task.iteration)


def achieved_waf(task: Task, now_us: int) -> int:
    """Weighted FLOP/s that the task has achieved since its first step was committed."""
    elapsed_us = now_us - task.first_commit_us
    if not task.first_commit_us or elapsed_us <= 0:
        return 0
    return delivered_flop(task) * 1_000_000 // elapsed_us
