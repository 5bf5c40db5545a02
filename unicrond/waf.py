"""Weighted achieved FLOP/s (WAF): what a cluster is worth, in integers (paper, section "plan generation").

T(t, x) is the achieved FLOP/s of task t on x workers; F(t, x) = weight * T(t, x), and 0 below the
task's minimum.

Rules
-----
* The *model* of T is the task file's table; where there is none, a straight line.
* What was *measured* (`ThroughputCorrected`) holds at its number of workers, and corrects the model elsewhere:
  by the ratio of measured to modelled at the nearest measured number, between two by what lies between theirs.
* A straight line has no scale of its own. Until the task is measured, one of its workers is worth what one
  of the others' is (the median over measured and tabled tasks); where nothing is known, LINEAR_FLOPS.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import median_low

import numpy as np

from events.vocabulary import TaskSpec
from unicrond.planning.problem import Curve
from unicrond.state import ClusterState, Task
from unicrond.work import LINEAR_FLOPS


def modelled(spec: TaskSpec, linear: int = LINEAR_FLOPS) -> Curve:
    """T(0..max_workers) before any measurement, FLOP/s. Counts that are no multiple of tp * pp are worth 0.

    A table in the task file counts as given; between its entries the next smaller one holds.
    `linear`: FLOP/s of one worker where there is no table.
    """
    known = _curves.get((id(spec), linear))
    if known is None or known[0] is not spec:
        if len(_curves) >= _CURVES_MAX:
            _curves.clear()
        table = tuple(spec.throughput.items())
        curve = _modelled(spec.max_workers, spec.replica_workers, table, 0 if table else linear)
        _curves[id(spec), linear] = known = (spec, curve)
    return known[1]


#: What was asked for last: a spec never changes, and the fold asks for its curve at every event.
_curves: dict[tuple[int, int], tuple[TaskSpec, Curve]] = {}
_CURVES_MAX = 4096


def throughput(task: Task, linear: int = LINEAR_FLOPS) -> Curve:
    """T(0..max_workers) as far as it is known today, FLOP/s."""
    if not task.measured:
        return modelled(task.spec, linear)
    spec = task.spec
    table = tuple(spec.throughput.items())
    measured = tuple((int(workers), flops) for workers, flops in task.measured.items())
    return _corrected(spec.max_workers, spec.replica_workers, table, tuple(sorted(measured)))


def linear_flops(state: ClusterState) -> int:
    """FLOP/s of one worker of a task of which nothing is known; where there is no such task, nobody looks at it."""
    if all(task.measured or task.spec.throughput for task in state.tasks.values()):
        return LINEAR_FLOPS
    known = [flops // workers for task in state.tasks.values() for workers, flops in _known(task)]
    return max(1, median_low(known)) if known else LINEAR_FLOPS


def _known(task: Task) -> list[tuple[int, int]]:
    """The task's best known point, if there is one: measured before tabled, more workers before fewer."""
    table = task.measured or task.spec.throughput
    if not table:
        return []
    workers = max(int(workers) for workers in table)
    return [(workers, table[str(workers)])]


@lru_cache(maxsize=4096)
def _modelled(max_workers: int, unit: int, table: tuple[tuple[str, int], ...], linear: int) -> Curve:
    known = sorted((int(workers), flops) for workers, flops in table)
    points: dict[int, int] = {}
    below, flops = 0, 0
    for workers in range(unit, max_workers + 1, unit):
        while below < len(known) and known[below][0] <= workers:
            flops = known[below][1]
            below += 1
        points[workers] = flops if table else workers * linear
    return Curve(points)


@lru_cache(maxsize=4096)
def _corrected(
    max_workers: int, unit: int, table: tuple[tuple[str, int], ...], measured: tuple[tuple[int, int], ...]
) -> Curve:
    # Additions, products and quotients of float64, one at a time: the same bits on every machine.
    curve = _modelled(max_workers, unit, table, 0 if table else LINEAR_FLOPS)
    anchors = [(workers, flops) for workers, flops in measured if curve(workers)]
    if not anchors:
        return curve
    at = np.array([workers for workers, _ in anchors], dtype=np.float64)
    ratio = np.array([flops / curve(workers) for workers, flops in anchors], dtype=np.float64)
    x = curve.workers.astype(np.float64)
    right = np.clip(np.searchsorted(at, x), 0, len(at) - 1)
    left = np.clip(right - 1, 0, len(at) - 1)
    span = np.where(at[right] > at[left], at[right] - at[left], 1.0)
    share = np.clip((x - at[left]) / span, 0.0, 1.0)
    scaled = np.rint(curve.flops * (ratio[left] + (ratio[right] - ratio[left]) * share))
    points = dict(zip(curve.workers.tolist(), (int(flops) for flops in scaled.tolist()), strict=True))
    return Curve(points | dict(anchors))


def waf(task: Task, workers: int, linear: int = LINEAR_FLOPS) -> int:
    """F(t, workers), weighted FLOP/s."""
    if workers < task.spec.min_workers or workers > task.spec.max_workers:
        return 0
    return int(task.spec.weight * throughput(task, linear)(workers))
