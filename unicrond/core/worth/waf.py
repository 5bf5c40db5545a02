"""Weighted achieved FLOP/s (WAF): what a cluster is worth, in integers (paper, section "plan generation").

T(t, x) is the achieved FLOP/s of task t on x workers; F(t, x) = weight * T(t, x), and 0 below the
task's minimum.

Rules
-----
* The *model* of T is the task file's table; where there is none, a straight line.
* What was *measured* (`ThroughputCorrected`) holds at its number of workers, and corrects the model elsewhere:
  by the ratio of measured to modelled at the nearest measured number, between two by what lies between theirs.
* A task that may have several layouts has a T for each. What was measured in one corrects those in which nothing was:
  by the ratio at as many workers, from the nearest layout (fewest doublings of its degrees, the first of equals).
* A task on another type of GPU has another T (gpu_types.py): a task is asked as it is on one type.
* A straight line has no scale of its own. Until the task is measured, one of its workers is worth what one
  of the others' is (the median over measured and tabled tasks); where nothing is known, LINEAR_FLOPS.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from math import log2
from statistics import median_low
from typing import Literal, NamedTuple

from msgspec.structs import replace

from unicrond.core.nodes.gpu_types import spec_on
from unicrond.core.planning.problem import Curve, Number
from unicrond.core.state.ordered_map import changed
from unicrond.core.state.state import ClusterState, Task
from unicrond.core.state.work import LINEAR_FLOPS
from unicrond.core.tasks.reshaping import layout_key, layouts_of, most_workers
from unicrond.events.vocabulary import TaskSpec
from unicrond.events.vocabulary.shape import Shape


class Model(NamedTuple):
    """What a task file says of T: a table, `at` so many workers (rising) `flops`; without one a line of `linear` FLOP/s
    per worker. Counts that are no multiple of `unit`, or more than `most`, are worth 0.
    """

    unit: int
    most: int
    at: tuple[int, ...]
    flops: tuple[int, ...]
    linear: int

    def __call__(self, workers: int) -> int:
        """Return FLOP/s on that many workers; between the table's entries the next smaller one holds."""
        if not 0 < workers <= self.most or workers % self.unit:
            return 0
        if not self.at:
            return workers * self.linear
        below = bisect_right(self.at, workers)
        return self.flops[below - 1] if below else 0


class CalibratedModel(NamedTuple):
    """A model, corrected by what was measured `at` so many workers (rising)."""

    model: Model
    at: tuple[int, ...]
    flops: tuple[int, ...]
    ratio: tuple[float, ...]

    def __call__(self, workers: int) -> int:
        """Return FLOP/s on that many workers."""
        right = min(bisect_left(self.at, workers), len(self.at) - 1)
        if self.at[right] == workers:
            return self.flops[right]
        return round(float(self.model(workers)) * self.ratio_at(workers))

    def ratio_at(self, workers: int) -> float:
        """Return the ratio of measured to modelled."""
        high = min(bisect_left(self.at, workers), len(self.at) - 1)
        # Additions, products and quotients of float64, one at a time: the same bits on every machine.
        low = max(high - 1, 0)
        span = float(self.at[high]) - float(self.at[low])
        share = min(max((workers - float(self.at[low])) / (span or 1.0), 0.0), 1.0)
        return self.ratio[low] + (self.ratio[high] - self.ratio[low]) * share


class ExtrapolatedModel(NamedTuple):
    """The model of a layout in which nothing was measured, corrected by what was in `near`."""

    model: Model
    near: CalibratedModel

    def __call__(self, workers: int) -> int:
        """Return FLOP/s on that many workers."""
        return round(float(self.model(workers)) * self.near.ratio_at(workers))


def model_of(spec: TaskSpec, linear: int = LINEAR_FLOPS) -> Model:
    """Return T before any measurement. `linear`: FLOP/s of one worker without a table."""
    at, flops = _sorted(spec.throughput)
    return Model(spec.replica_workers, spec.max_workers, at, flops, linear)


#: By a table's identity: the table itself, so that no other gets the same identity, and what `_sorted` returns.
_tables: dict[int, tuple[Mapping[str, int], tuple[int, ...], tuple[int, ...]]] = {}
_TABLES_MAX = 8192


def _sorted(table: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the table's workers, rising, and their FLOP/s. This is most of what T of a task costs: once for each
    table."""
    if not table:
        return (), ()
    entry = _tables.get(id(table))
    if entry is None:
        if len(_tables) >= _TABLES_MAX:
            _tables.clear()
        points = sorted((int(workers), flops) for workers, flops in table.items())
        entry = (table, tuple([workers for workers, _ in points]), tuple([flops for _, flops in points]))
        _tables[id(table)] = entry
    return entry[1], entry[2]


def in_layout(spec: TaskSpec, shape: Shape) -> TaskSpec:
    """Return the task as its model of T has it in this layout: whole replicas, and no more than micro-batches."""
    if not spec.layouts:
        return spec
    table = next((entry.throughput for entry in spec.layouts if entry.shape == shape), spec.throughput)
    if shape == spec.shape:
        table = spec.throughput
    layout = shape._replace(micro_batch=shape.micro_batch or spec.micro_batch)
    return replace(spec, **layout._asdict(), throughput=table, max_workers=max(1, most_workers(spec, shape)))


def flops_of(
    task: Task, linear: int = LINEAR_FLOPS, shape: Shape | None = None
) -> Model | CalibratedModel | ExtrapolatedModel:
    """Return T as far as it is known today, in its present layout or in another: call it with a number of workers."""
    shape, on_gpu = shape or task.spec.shape, spec_on(task.spec, task.pace.gpu)
    spec = in_layout(on_gpu, shape)
    measurements = _measured_in(task, shape)
    if measurements:
        return _corrected(model_of(spec), measurements)
    if spec.layouts:
        for neighbour in sorted(layouts_of(task.spec), key=lambda candidate: _doublings(candidate, shape)):
            near = _measured_in(task, neighbour)
            anchor = _corrected(model_of(in_layout(on_gpu, neighbour)), near) if near else None
            if isinstance(anchor, CalibratedModel):
                return ExtrapolatedModel(model_of(spec), anchor)
    return model_of(spec, linear)


def _measured_in(task: Task, shape: Shape) -> dict[str, int]:
    if shape == task.spec.shape:
        return task.pace.measurements
    return task.pace.other_layouts.get(layout_key(shape), {})


def _doublings(first: Shape, second: Shape) -> float:
    """Return how far two layouts are apart."""
    pairs = zip(first, second, strict=True)
    return sum(abs(log2(a / b)) for a, b in pairs if a and b)


def _corrected(model: Model, flops_at: Mapping[str, int]) -> Model | CalibratedModel:
    points = sorted((int(workers), flops) for workers, flops in flops_at.items())
    anchors = [(workers, flops) for workers, flops in points if model(workers)]
    if not anchors:
        return model
    return CalibratedModel(
        model,
        tuple([workers for workers, _ in anchors]),
        tuple([flops for _, flops in anchors]),
        tuple([flops / _float(model(workers)) for workers, flops in anchors]),
    )


def _float(flops: int) -> Number:
    """Return the number as float64 where that is exact, as curves hold it."""
    return float(flops) if float(flops) == flops else flops


def modelled(spec: TaskSpec, linear: int = LINEAR_FLOPS) -> Curve:
    """Return T(0..max_workers) before any measurement, FLOP/s."""
    return _curve(spec, model_of(spec, linear))


def throughput(task: Task, linear: int = LINEAR_FLOPS, shape: Shape | None = None) -> Curve:
    """Return T(0..max_workers) as far as it is known today, FLOP/s; in its present layout, or in another."""
    spec = in_layout(spec_on(task.spec, task.pace.gpu), shape or task.spec.shape)
    return _curve(spec, flops_of(task, linear, shape))


def _curve(spec: TaskSpec, flops: Model | CalibratedModel | ExtrapolatedModel) -> Curve:
    unit = spec.replica_workers
    return Curve({workers: flops(workers) for workers in range(unit, spec.max_workers + 1, unit)})


def has_scale(task: Task) -> bool:
    """Return whether its T is known in FLOP/s; of other tasks it is a line of `linear_flops`."""
    return bool(task.pace.measurements or task.pace.other_layouts or spec_on(task.spec, task.pace.gpu).throughput)


def linear_flops(state: ClusterState) -> int:
    """Return FLOP/s of one worker of a task of which nothing is known."""
    rates = [flops for task in state.tasks.values() if (flops := _per_worker(task))]
    return max(1, median_low(rates)) if rates else LINEAR_FLOPS


def waf_unit(state: ClusterState) -> Literal["FLOP/s", "weighted workers"]:
    """Return what WAF is in: weighted workers, of LINEAR_FLOPS each, until the throughput of any task is known."""
    return "FLOP/s" if any(_per_worker(task) for task in state.tasks.values()) else "weighted workers"


def waf(task: Task, workers: int, linear: int = LINEAR_FLOPS, shape: Shape | None = None) -> int:
    """Return F(t, workers), weighted FLOP/s, in its present layout or in another."""
    if workers < task.spec.min_workers or workers > task.spec.max_workers:
        return 0
    return int(task.spec.weight * flops_of(task, linear, shape)(workers))


def best_waf(task: Task, workers: int, linear: int = LINEAR_FLOPS) -> int:
    """Return F(t, workers) in the best of its layouts."""
    return max(waf(task, workers, linear, shape) for shape in layouts_of(task.spec))


def worth_stays(before: ClusterState, after: ClusterState) -> bool:
    """Return whether every task's F is what it was, and the same tasks have one. A yes is never wrong."""
    if before.tasks is after.tasks:
        return True
    if len(before.tasks) != len(after.tasks):
        return False
    for was, task in changed(before.tasks, after.tasks).values():
        if was is None or task is None or was.spec is not task.spec or was.status is not task.status:
            return False
        if was.pace.measurements is not task.pace.measurements or was.pace.other_layouts is not task.pace.other_layouts:
            return False
        if was.pace.gpu != task.pace.gpu:
            return False
    return True


def _per_worker(task: Task) -> int:
    """Return FLOP/s of one of the task's workers where most of them were measured, else tabled; 0 where neither is
    known."""
    table = spec_on(task.spec, task.pace.gpu).throughput
    by_workers = task.pace.measurements or next(iter(task.pace.other_layouts.values()), {}) or table
    most = max(by_workers, key=int, default="")
    return by_workers[most] // int(most) if most else 0
