"""The plan problem: the question that every re-plan answers.

    maximise   sum_t G(t, x -> x')     subject to   sum_t x'_t <= n'
    G(t, x -> x') = F(t, x') * D_running - F(t, x) * price(x -> x')
    F(t, x) = w(t) * T(t, x)  where x meets the task's minimum, else 0       (Unicron, arXiv 2401.00134)

Rules
-----
* n' counts the workers that are left *after* the event; x is what a task had *before* it.
* A choice is a number of workers and a layout: 0 workers, or any multiple of the layout's replica up to its cap. x is
  in the present layout; T has a curve for each.
* What a change costs, as time of the task's work; it depends on the task's own choices before and after alone:

      nothing            it stays as it is and is healthy
      D_restart          it achieves nothing from now on, and will have to start again from a stored state; never less
                         than the others
      D_reshape          it gets another layout: all workers hand over and end, and others assemble the state
      D_transition       it is faulty and its layout stays: the survivors regroup
      D_move             it is healthy, and its number of workers changes

  D_restart, D_reshape and D_move are D_transition unless given. A healthy task that changes pays D_churn on top.
* A floor is unmet where x' < floor. Which floors are met is decided first, by priority and worth (`floors.py`); the
  objective second.
* Where nodes have GPUs of several types, each type is a *pool*, and a choice names its pool too: T differs there,
  and all replicas of a task are in one pool. A change of the pool costs D_reshape (`pools.py`).
* Some nodes start no workers (a person has cordoned them): they are *closed*. The workers that stand there may stay,
  with the rest of their replicas: they are *residents*, and nobody else gets their seats. So a plan shares the *open
  seats*, those of all other nodes, and a choice needs one for each worker but the residents that stay. A task that
  keeps some of its replicas keeps those with most residents; in another layout it keeps none.
* The churn term is ours, not the paper's: the price of moving a task of which nothing is broken. It is 0
  unless given.

Not part of this module: how it is solved (`solver.py`), where T comes from, where D_running comes from.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from unicrond.events.vocabulary.shape import Shape

if TYPE_CHECKING:  # to read a log needs curves and no numpy
    import numpy as np
    from numpy.typing import NDArray

Number: TypeAlias = int | float


#: The most tasks that have a turn at a time.
TURNS_MAX = 4


class ProblemError(ValueError):
    """An invalid problem; the message names the field and the fix."""


class Curve:
    """T(x): workers -> achieved FLOP/s. Sparse: workers that are not named achieve 0. Immutable.

    Two curves are equal if their points are; comparing costs nothing per point.
    """

    def __init__(self, points: Mapping[int, Number]) -> None:
        """Load `points`: workers -> FLOP/s. Raise ProblemError for negative or non-finite numbers."""
        self._load(list(points), list(points.values()))

    @classmethod
    def dense(cls, flops: Sequence[Number]) -> Curve:
        """Build the curve from T(0), T(1), ... in FLOP/s."""
        curve = cls.__new__(cls)
        curve._load(range(len(flops)), flops)
        return curve

    def _load(self, workers: Sequence[int], flops: Sequence[Number]) -> None:
        pairs = list(zip(workers, flops, strict=True))
        pairs.sort(key=itemgetter(0))
        self._workers = array("q", [at for at, _ in pairs])
        self._flops = array("d", [value for _, value in pairs])
        if self._workers and self._workers[0] < 0:
            raise ProblemError(f"throughput: {self._workers[0]} workers; give counts >= 0")
        # The sum is finite only if all are; a loop over them is slow, and needed only to name the bad one.
        if self._flops and not (min(self._flops) >= 0 and sum(self._flops) < inf):
            for at_workers, value in self.rounded():
                if not 0 <= value < inf:
                    raise ProblemError(f"throughput at {at_workers} workers is {value}; give a finite number >= 0")
        # Integers that float64 cannot hold, so that objectives are computed from the very numbers of the caller.
        self._rounded: dict[int, Number] = {}
        if self._flops and max(self._flops) > 2**53:
            self._rounded = {k: v for k, v in zip(workers, flops, strict=True) if int(float(v)) != v}
        content = self._workers.tobytes() + self._flops.tobytes() + repr(self._rounded).encode()
        self._digest = hashlib.blake2b(content, digest_size=16).digest()

    @cached_property
    def workers(self) -> NDArray[np.int64]:
        """Return the worker counts of the points, rising."""
        import numpy as np

        return np.array(self._workers, dtype=np.int64)

    @cached_property
    def flops(self) -> NDArray[np.float64]:
        """Return their FLOP/s, rounded to float64."""
        import numpy as np

        return np.array(self._flops, dtype=np.float64)

    def __call__(self, workers: int) -> Number:
        """Return the FLOP/s on `workers` workers."""
        if workers in self._rounded:
            return self._rounded[workers]
        at = bisect_left(self._workers, workers)
        return self._flops[at] if at < len(self._workers) and self._workers[at] == workers else 0.0

    def rounded(self) -> zip[tuple[int, float]]:
        """Return the points with their FLOP/s in float64, by rising number of workers."""
        return zip(self._workers, self._flops, strict=True)

    @property
    def points(self) -> dict[int, Number]:
        """Return the points, by rising number of workers."""
        return {**dict(self.rounded()), **self._rounded}

    def __len__(self) -> int:
        return len(self._workers)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Curve) and self._digest == other._digest)

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        preview = ", ".join(f"{k}: {v:.6g}" for k, v in list(self.points.items())[:4])
        return f"<Curve of {len(self)} points: {preview}{', ...' if len(self) > 4 else ''}>"


@dataclass(frozen=True)
class Alternative:
    """Another layout that the task may get: its replicas' shape, T in it, and the most workers (None: no cap). `gpu`:
    its pool."""

    shape: Shape
    curve: Curve
    most: int | None = None
    gpu: str = ""

    def may_have(self, workers: int) -> bool:
        """Return whether so many workers (more than 0) can run in this layout."""
        return workers % self.shape.workers == 0 and (self.most is None or workers <= self.most)


@dataclass(frozen=True)
class Prices:
    """The costs of changes in the unit of the durations, where they are not D_transition. See the module."""

    move_us: Number | None = None
    reshape_us: Number | None = None
    restart_us: Number | None = None

    def over(self, transition: Number) -> tuple[Number, Number, Number]:
        """Return D_move, D_reshape and D_restart of a task with this D_transition."""
        prices = (self.move_us, self.reshape_us, self.restart_us)
        move, reshape, restart = (transition if price is None else price for price in prices)
        return move, reshape, max(transition, move, reshape, restart)


@dataclass(frozen=True)
class TaskProblem:
    """One task's part of the problem.

    `workers`: x, before the event. `faulty`: the event hit one of its workers. `min_workers`: F is 0 below.
    `max_workers`: the cap, None for none. `floor`: see the module. `unit`: workers of a replica, workers come in
    multiples of it. `throughput`: T(x) in FLOP/s, as a Curve or as the tuple T(0), T(1), ...
    `d_transition_us`: the task's own, where it is not the problem's. `tp`: how many workers of a replica need one node.
    `priority`, `preemptible`: whose floor is met first, where not all can be. `turn`: likewise, within a priority: 0 =
    none; no two tasks have the same otherwise. `floor_worth`: of the floor, where it is not to be computed from the
    choices that are left here (floors.py).
    `alternatives`: other layouts that it may get; `unit`, `tp`, `throughput` and `max_workers` are of the present one.
    `gpu`: its pool. `form`: the whole present layout, where it has more than tp and pp.
    `residents`: of each present replica that has some, how many of its workers stand on closed nodes; most first.
    """

    name: str
    weight: Number
    workers: int
    throughput: Curve | tuple[Number, ...]
    faulty: bool = False
    min_workers: int = 0
    max_workers: int | None = None
    floor: int = 0
    unit: int = 1
    d_transition_us: Number | None = None
    tp: int = 1
    alternatives: tuple[Alternative, ...] = ()
    prices: Prices = Prices()
    turn: int = 0
    gpu: str = ""
    form: Shape | None = None
    priority: int = 0
    preemptible: bool = False
    floor_worth: Fraction | None = None
    residents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.weight < inf:
            raise ProblemError(f"task {self.name}: weight is {self.weight}; give a finite number >= 0")
        if not 0 <= self.turn <= TURNS_MAX:
            raise ProblemError(f"task {self.name}: turn is {self.turn}; give 0 to {TURNS_MAX}")
        for field in ("workers", "min_workers", "max_workers", "floor"):
            value = getattr(self, field)
            if value is not None and value < 0:
                raise ProblemError(f"task {self.name}: {field} is {value}; give a number >= 0")
        if self.unit < 1:
            raise ProblemError(f"task {self.name}: unit is {self.unit}; give the workers of a replica, at least 1")
        if self.d_transition_us is not None and not 0 <= self.d_transition_us < inf:
            fault = f"d_transition_us is {self.d_transition_us}"
            raise ProblemError(f"task {self.name}: {fault}; give a finite number >= 0")
        for field in ("move_us", "reshape_us", "restart_us"):
            price = getattr(self.prices, field)
            if price is not None and not 0 <= price < inf:
                raise ProblemError(f"task {self.name}: {field} is {price}; give a finite number >= 0")
        if self.tp < 1 or self.unit % self.tp:
            raise ProblemError(f"task {self.name}: tp is {self.tp}; give a divisor of unit ({self.unit})")
        counts = (self.unit, *self.residents, 1)
        if any(later > earlier for earlier, later in pairwise(counts)):
            fault = f"residents are {self.residents}"
            raise ProblemError(f"task {self.name}: {fault}; give 1 to unit ({self.unit}) for each replica, most first")

    @cached_property
    def curve(self) -> Curve:
        """Return T as a Curve."""
        return self.throughput if isinstance(self.throughput, Curve) else Curve.dense(self.throughput)

    @property
    def shape(self) -> Shape:
        """Return the shape of the present layout."""
        return self.form or Shape(self.tp, self.unit // self.tp)

    @property
    def priority_class(self) -> tuple[bool, int]:
        """Return the class in which its floor is weighed; the higher class first."""
        return not self.preemptible, self.priority

    @cached_property
    def group_sizes(self) -> frozenset[int]:
        """Return tp of all its layouts."""
        return frozenset([self.tp, *(option.shape.tp for option in self.alternatives)])

    def shape_of(self, layout: int) -> Shape:
        """Return the shape of a layout: 0 is the present one, 1 the first alternative."""
        return self.alternatives[layout - 1].shape if layout else self.shape

    def gpu_of(self, layout: int) -> str:
        """Return the pool of a layout."""
        return self.alternatives[layout - 1].gpu if layout else self.gpu

    def may_stay(self, workers: int) -> bool:
        """Return whether the task may have so many workers in its present layout (0 is always legal)."""
        return workers % self.unit == 0 and (self.max_workers is None or workers <= self.max_workers)

    def may_have(self, workers: int) -> bool:
        """Return whether the task may run on that many workers at all (0 is always legal)."""
        return self.may_stay(workers) or any(option.may_have(workers) for option in self.alternatives)

    def legal_layouts(self, workers: int) -> list[int]:
        """Return the layouts in which the task may have so many workers; the present one first."""
        present = [0] if self.may_stay(workers) else []
        return present + [n for n, option in enumerate(self.alternatives, 1) if workers and option.may_have(workers)]

    @cached_property
    def floor_point(self) -> int:
        """Return the fewest workers that meet the floor; 0 where there is no floor or no legal number meets it."""
        units = (self.unit, *(option.shape.workers for option in self.alternatives))
        points = [-(-self.floor // unit) * unit for unit in units]
        return min((point for point in points if self.may_have(point)), default=0)

    @cached_property
    def least_that_achieves(self) -> int | None:
        """Return the fewest workers, no fewer than the floor, that achieve anything; None if none do."""
        present = (self.curve, self.may_stay)
        curves = (present, *((option.curve, option.may_have) for option in self.alternatives))
        least_counts = (
            next((at for at, flops in curve.rounded() if flops and at >= self.floor and may_have(at)), None)
            for curve, may_have in curves
        )
        return min((at for at in least_counts if at is not None), default=None)

    def open_seats(self, workers: int, layout: int = 0) -> int:
        """Return how many seats on open nodes so many workers need in a layout."""
        return workers if layout else workers - sum(self.residents[: workers // self.unit])

    def waf(self, workers: int, layout: int = 0) -> Fraction:
        """Return F(t, workers) in a layout: weighted achieved FLOP/s, exact."""
        curve = self.alternatives[layout - 1].curve if layout else self.curve
        return Fraction(self.weight) * Fraction(curve(workers)) if workers >= self.min_workers else Fraction(0)


@dataclass(frozen=True)
class Pool:
    """The nodes with one type of GPU: their slots, their seats and how many slots are closed, as in Problem."""

    gpu: str
    workers: int
    seats: tuple[tuple[int, int], ...] = ()
    closed: int = 0


@dataclass(frozen=True)
class Problem:
    """The whole problem. `tasks` are in the canonical order: ties are decided from the first to the last.

    `workers`: n', after the event. `d_running_us`: expected time to the next failure at n'.
    `d_transition_us`: expected duration of a transition. `churn_us`: see the module; 0 = off.
    The durations only need one common unit; microseconds is the coordinator's.
    `seats`: (slots, how many open nodes have them), rising: all tensor-parallel groups of a plan but those of residents
    must fit there; empty = not checked (feasibility.py).
    `pools`: `workers` and `closed` are their sums, and they have the `seats`; empty where there is one type of GPU.
    `closed`: how many of the `workers` have their seats on closed nodes.
    """

    workers: int
    d_running_us: Number
    d_transition_us: Number
    tasks: tuple[TaskProblem, ...]
    churn_us: Number = 0
    seats: tuple[tuple[int, int], ...] = ()
    pools: tuple[Pool, ...] = ()
    closed: int = 0

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ProblemError(f"workers is {self.workers}; give the workers left after the event, >= 0")
        for field in ("d_running_us", "d_transition_us", "churn_us"):
            value = getattr(self, field)
            if not (value >= 0 and isfinite(value)):
                raise ProblemError(f"{field} is {value}; give a finite number >= 0")
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ProblemError(f"tasks: {twice} appears twice; give each task its own name")
        turns = [task.turn for task in self.tasks if task.turn]
        if len(set(turns)) != len(turns):
            raise ProblemError("tasks: two have the same turn; give each its own")
        resident_tasks = [task for task in self.tasks if task.residents]
        residents = sum([sum(task.residents) for task in resident_tasks])
        if not residents <= self.closed <= self.workers:
            raise ProblemError(f"closed is {self.closed}; give {residents} (the residents) to {self.workers} (workers)")
        for task in resident_tasks:
            if any(option.gpu == task.gpu for option in task.alternatives):
                raise ProblemError(f"task {task.name}: it has residents and alternatives in its pool; give one of both")

    @cached_property
    def sums_only(self) -> Problem:
        """Return the same problem where workers need only add up. Its plan is this problem's too, if that has room."""
        if not (self.closed or self.seats):
            return self
        tasks = tuple([replace(task, residents=()) if task.residents else task for task in self.tasks])
        return replace(self, tasks=tasks, closed=0, seats=())

    @property
    def open_workers(self) -> int:
        """Return how many workers the open nodes have seats for."""
        return self.workers - self.closed

    def transition_of(self, task: TaskProblem) -> Number:
        """Return D_transition for this task."""
        return self.d_transition_us if task.d_transition_us is None else task.d_transition_us

    def price(self, task: TaskProblem, workers: int, layout: int) -> Fraction:
        """Return the cost of the change, as time of the task's present work."""
        if not layout and workers == task.workers and not task.faulty:
            return Fraction(0)
        return Fraction(self.time_of(task, workers, layout)) + (0 if task.faulty else Fraction(self.churn_us))

    def time_of(self, task: TaskProblem, workers: int, layout: int) -> Number:
        """Return how long a change takes; only valid where something changes."""
        transition = self.transition_of(task)
        move, reshape, restart = task.prices.over(transition)
        if not task.waf(workers, layout):
            return restart
        if layout:
            return reshape
        return transition if task.faulty else move

    def gain_in(self, task: TaskProblem, workers: int, layout: int) -> Fraction:
        """Return G(t, x -> workers in this layout), exact: weighted FLOP/s times the unit of the durations."""
        cost = task.waf(task.workers) * self.price(task, workers, layout)
        return task.waf(workers, layout) * Fraction(self.d_running_us) - cost

    def layout_for(self, task: TaskProblem, workers: int) -> int:
        """Return the best layout for so many workers; the present one if it is as good, else the first that achieves
        most."""
        if not task.alternatives:
            return 0
        legal = task.legal_layouts(workers)
        if not any(legal):
            return 0
        # A change to any alternative costs the same: the one that achieves most is best.
        counts = workers >= task.min_workers and task.weight > 0
        best = max(
            [layout for layout in legal if layout],
            key=lambda layout: (task.alternatives[layout - 1].curve(workers) * counts, -layout),
        )
        if 0 not in legal:
            return best
        # Nearly always float64 can distinguish them.
        present_gain, other_gain = (self._approximate_gain(task, workers, layout) for layout in (0, best))
        if abs(present_gain[0] - other_gain[0]) > 1e-9 * (present_gain[1] + other_gain[1]):
            return 0 if present_gain[0] > other_gain[0] else best
        return best if self.gain_in(task, workers, best) > self.gain_in(task, workers, 0) else 0

    def _approximate_gain(self, task: TaskProblem, workers: int, layout: int) -> tuple[float, float]:
        """Return `gain_in` in float64, and the sum of its terms' sizes."""
        weight, curve = float(task.weight), task.alternatives[layout - 1].curve if layout else task.curve
        gain = float(curve(workers)) * weight * float(self.d_running_us) if workers >= task.min_workers else 0.0
        present_waf = float(task.curve(task.workers)) * weight if task.workers >= task.min_workers else 0.0
        if not layout and workers == task.workers and not task.faulty:
            return gain, gain
        cost = present_waf * (
            float(self.time_of(task, workers, layout)) + (0.0 if task.faulty else float(self.churn_us))
        )
        return gain - cost, gain + cost

    def gain(self, task: TaskProblem, workers: int) -> Fraction:
        """Return G(t, x -> workers) in the best layout, exact."""
        return self.gain_in(task, workers, self.layout_for(task, workers))
