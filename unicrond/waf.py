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

from bisect import bisect_left
from functools import lru_cache
from statistics import median_low
from typing import NamedTuple

from events.vocabulary import TaskSpec
from unicrond.planning.problem import Curve
from unicrond.state import ClusterState, Task
from unicrond.work import LINEAR_FLOPS


def modelled(spec: TaskSpec, linear: int = LINEAR_FLOPS) -> Curve:
    """T(0..max_workers) before any measurement, FLOP/s. Counts that are no multiple of tp * pp are worth 0.

    A table in the task file counts as given; between its entries the next smaller one holds.
    `linear`: FLOP/s of one worker where there is no table.
    """
    return _facts(spec).tabled or _line(spec.max_workers, spec.replica_workers, linear)


def throughput(task: Task, linear: int = LINEAR_FLOPS) -> Curve:
    """T(0..max_workers) as far as it is known today, FLOP/s."""
    if not task.pace.measured:
        return modelled(task.spec, linear)
    measured = tuple(sorted((int(workers), flops) for workers, flops in task.pace.measured.items()))
    return _corrected(modelled(task.spec), measured)


def linear_flops(state: ClusterState) -> int:
    """FLOP/s of one worker of a task of which nothing is known."""
    known = [flops for task in state.tasks.values() if (flops := _per_worker(task))]
    return max(1, median_low(known)) if known else LINEAR_FLOPS


def waf(task: Task, workers: int, linear: int = LINEAR_FLOPS) -> int:
    """F(t, workers), weighted FLOP/s."""
    if workers < task.spec.min_workers or workers > task.spec.max_workers:
        return 0
    return int(task.spec.weight * throughput(task, linear)(workers))


def _per_worker(task: Task) -> int:
    """FLOP/s of one of the task's workers where most of them were measured, else tabled; 0 where neither is known."""
    if not task.pace.measured:
        return _facts(task.spec).per_worker
    workers = max(int(workers) for workers in task.pace.measured)
    return task.pace.measured[str(workers)] // workers


# --- kept, because they are asked for at every event ----------------------------------------------


class _Facts(NamedTuple):
    """What a spec says. `tabled`: None without a table. `per_worker`: FLOP/s at the table's end, 0 without one."""

    spec: TaskSpec
    tabled: Curve | None
    per_worker: int


#: By the spec's identity: to hash a table of thousands of points would take longer than to plan.
_known: dict[int, _Facts] = {}
_KNOWN_MAX = 4096


def _facts(spec: TaskSpec) -> _Facts:
    facts = _known.get(id(spec))
    if facts is None or facts.spec is not spec:
        if len(_known) >= _KNOWN_MAX:
            _known.clear()
        facts = _known[id(spec)] = _read(spec)
    return facts


def _read(spec: TaskSpec) -> _Facts:
    if not spec.throughput:
        return _Facts(spec, None, 0)
    table = sorted((int(workers), flops) for workers, flops in spec.throughput.items())
    points: dict[int, int] = {}
    below, flops = 0, 0
    for workers in range(spec.replica_workers, spec.max_workers + 1, spec.replica_workers):
        while below < len(table) and table[below][0] <= workers:
            flops = table[below][1]
            below += 1
        points[workers] = flops
    return _Facts(spec, Curve(points), table[-1][1] // table[-1][0])


@lru_cache(maxsize=1024)
def _line(max_workers: int, unit: int, linear: int) -> Curve:
    return Curve({workers: workers * linear for workers in range(unit, max_workers + 1, unit)})


@lru_cache(maxsize=1024)
def _corrected(curve: Curve, measured: tuple[tuple[int, int], ...]) -> Curve:
    # Additions, products and quotients of float64, one at a time: the same bits on every machine.
    anchors = [(workers, flops) for workers, flops in measured if curve(workers)]
    if not anchors:
        return curve
    at = [float(workers) for workers, _ in anchors]
    ratio = [flops / curve(workers) for workers, flops in anchors]
    last = len(at) - 1
    points: dict[int, int] = {}
    for workers, flops in curve.rounded():
        right = min(bisect_left(at, workers), last)
        left = max(right - 1, 0)
        share = min(max((workers - at[left]) / ((at[right] - at[left]) or 1.0), 0.0), 1.0)
        points[workers] = round(flops * (ratio[left] + (ratio[right] - ratio[left]) * share))
    return Curve(points | dict(anchors))
