"""The plan problem: the question that every re-plan answers.

    maximise   sum_t G(t, x -> x')     subject to   sum_t x'_t <= n'
    G(t, x -> x') = F(t, x') * D_running - F(t, x) * price(x -> x')
    F(t, x) = w(t) * T(t, x)  where x meets the task's minimum, else 0       (Unicron, arXiv 2401.00134)

Rules
-----
* n' counts the workers that are left *after* the event; x is what a task had *before* it.
* A choice is a number of workers and a layout: 0 workers, or any multiple of the layout's tp * pp up to its cap. x is
  in the present layout; T has a curve for each.
* What a change costs, as time of the task's work; it depends on the task's own choices before and after alone:

      nothing            it stays as it is and is healthy
      D_restart          it achieves nothing from now on, and will have to begin again from a kept state; never less
                         than the others
      D_reshape          it gets another layout: all hand over, end, and others put the state together
      D_transition       it is faulty and its layout stays: the survivors regroup
      D_move             it is healthy, and its number of workers is another

  D_restart, D_reshape and D_move are D_transition unless given. A healthy task that changes pays D_churn on top.
* A floor is unmet where x' < floor. The number of unmet floors is minimised first, the objective second.
* Before both, floors of tasks that have a turn are met, where that can be: the highest turn first, whatever it costs
  the lower ones (`TaskProblem.turn`; who has one: turns.py).
* Where nodes have GPUs of several types, each type is a *pool*, and a choice names its pool too: T is another there,
  and all replicas of a task are in one. A change of the pool costs D_reshape (`pools.py`).
* The churn term is ours, not the paper's: the price of moving a task of which nothing is broken. It is 0
  unless given.

What does not live here: how it is solved (`solver.py`), where T comes from, where D_running comes from.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import inf, isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from events.shape import Shape

if TYPE_CHECKING:  # to read a log needs curves and no numpy
    import numpy as np
    from numpy.typing import NDArray

Number: TypeAlias = int | float


#: As many tasks have a turn at a time, at most: each takes a bit of the precision where floors are unmet.
TURNS_MAX = 4


class ProblemError(ValueError):
    """A problem that makes no sense; the message names the field and the fix."""


class Curve:
    """T(x): workers -> achieved FLOP/s. Sparse: workers that are not named achieve 0. Immutable.

    Two curves are equal if their points are; comparing costs nothing per point.
    """

    def __init__(self, points: Mapping[int, Number]) -> None:
        """`points`: workers -> FLOP/s. Raises ProblemError for negative or non-finite numbers."""
        self._load(list(points), list(points.values()))

    @classmethod
    def dense(cls, flops: Sequence[Number]) -> Curve:
        """T(0), T(1), ... in FLOP/s."""
        curve = cls.__new__(cls)
        curve._load(range(len(flops)), flops)
        return curve

    def _load(self, workers: Sequence[int], flops: Sequence[Number]) -> None:
        named = list(zip(workers, flops, strict=True))
        named.sort(key=itemgetter(0))
        self._workers = array("q", [at for at, _ in named])
        self._flops = array("d", [value for _, value in named])
        if self._workers and self._workers[0] < 0:
            raise ProblemError(f"throughput: {self._workers[0]} workers; give counts >= 0")
        # The sum is finite only where all are; one by one is slow, and only to name the bad one.
        if self._flops and not (min(self._flops) >= 0 and sum(self._flops) < inf):
            for at_workers, value in self.rounded():
                if not 0 <= value < inf:
                    raise ProblemError(f"throughput at {at_workers} workers is {value}; give a finite number >= 0")
        # Integers that float64 cannot hold, so that objectives can be told from the very numbers given.
        self._rounded: dict[int, Number] = {}
        if self._flops and max(self._flops) > 2**53:
            self._rounded = {k: v for k, v in zip(workers, flops, strict=True) if int(float(v)) != v}
        content = self._workers.tobytes() + self._flops.tobytes() + repr(self._rounded).encode()
        self._digest = hashlib.blake2b(content, digest_size=16).digest()

    @cached_property
    def workers(self) -> NDArray[np.int64]:
        """The named points, rising."""
        import numpy as np

        return np.array(self._workers, dtype=np.int64)

    @cached_property
    def flops(self) -> NDArray[np.float64]:
        """Their FLOP/s, rounded to float64."""
        import numpy as np

        return np.array(self._flops, dtype=np.float64)

    def __call__(self, workers: int) -> Number:
        """FLOP/s on `workers` workers."""
        if workers in self._rounded:
            return self._rounded[workers]
        at = bisect_left(self._workers, workers)
        return self._flops[at] if at < len(self._workers) and self._workers[at] == workers else 0.0

    def rounded(self) -> zip[tuple[int, float]]:
        """The named points with their FLOP/s in float64, by rising number of workers."""
        return zip(self._workers, self._flops, strict=True)

    @property
    def points(self) -> dict[int, Number]:
        """The named points, by rising number of workers."""
        return {**dict(self.rounded()), **self._rounded}

    def __len__(self) -> int:
        return len(self._workers)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Curve) and self._digest == other._digest)

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}: {v:.6g}" for k, v in list(self.points.items())[:4])
        return f"<Curve of {len(self)} points: {shown}{', ...' if len(self) > 4 else ''}>"


@dataclass(frozen=True)
class Alternative:
    """Another layout that the task may get: its replicas' shape, T in it, and the most workers (None: no cap). `gpu`:
    its pool."""

    shape: Shape
    curve: Curve
    most: int | None = None
    gpu: str = ""

    def may_have(self, workers: int) -> bool:
        """Whether so many workers (more than 0) can stand in this layout."""
        return workers % self.shape.workers == 0 and (self.most is None or workers <= self.most)


@dataclass(frozen=True)
class Prices:
    """What changes cost in the unit of the durations, where that is not D_transition. See the module."""

    move_us: Number | None = None
    reshape_us: Number | None = None
    restart_us: Number | None = None

    def over(self, transition: Number) -> tuple[Number, Number, Number]:
        """D_move, D_reshape and D_restart of a task with this D_transition."""
        own = (self.move_us, self.reshape_us, self.restart_us)
        move, reshape, restart = (transition if price is None else price for price in own)
        return move, reshape, max(transition, move, reshape, restart)


@dataclass(frozen=True)
class TaskProblem:
    """One task's part of the problem.

    `workers`: x, before the event. `faulty`: the event hit one of its workers. `min_workers`: F is 0 below.
    `max_workers`: the cap, None for none. `floor`: see the module. `unit`: tp * pp, workers come in
    multiples of it. `throughput`: T(x) in FLOP/s, as a Curve or as the tuple T(0), T(1), ...
    `d_transition_us`: the task's own, where it is not the problem's. `tp`: how many workers of a replica need one node.
    `turn`: 0 = none; no two tasks have the same otherwise.
    `others`: layouts that it may get; `unit`, `tp`, `throughput` and `max_workers` are the present one's; `gpu`: pool.
    `form`: the whole of the present one, where there is more to it than tp and pp.
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
    others: tuple[Alternative, ...] = ()
    prices: Prices = Prices()
    turn: int = 0
    gpu: str = ""
    form: Shape | None = None

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
            raise ProblemError(f"task {self.name}: unit is {self.unit}; give tp * pp, at least 1")
        if self.d_transition_us is not None and not 0 <= self.d_transition_us < inf:
            told = f"d_transition_us is {self.d_transition_us}"
            raise ProblemError(f"task {self.name}: {told}; give a finite number >= 0")
        for field in ("move_us", "reshape_us", "restart_us"):
            price = getattr(self.prices, field)
            if price is not None and not 0 <= price < inf:
                raise ProblemError(f"task {self.name}: {field} is {price}; give a finite number >= 0")
        if self.tp < 1 or self.unit % self.tp:
            raise ProblemError(f"task {self.name}: tp is {self.tp}; give a divisor of unit ({self.unit})")

    @cached_property
    def curve(self) -> Curve:
        """T as a Curve."""
        return self.throughput if isinstance(self.throughput, Curve) else Curve.dense(self.throughput)

    @property
    def shape(self) -> Shape:
        """The present layout."""
        return self.form or Shape(self.tp, self.unit // self.tp)

    @cached_property
    def group_sizes(self) -> frozenset[int]:
        """tp of all its layouts."""
        return frozenset([self.tp, *(other.shape.tp for other in self.others)])

    def shape_of(self, layout: int) -> Shape:
        """The shape of a layout: 0 is the present one, 1 the first of the others."""
        return self.others[layout - 1].shape if layout else self.shape

    def gpu_of(self, layout: int) -> str:
        """The pool of a layout."""
        return self.others[layout - 1].gpu if layout else self.gpu

    def may_stay(self, workers: int) -> bool:
        """Whether the task may have so many workers in its present layout (0 is always legal)."""
        return workers % self.unit == 0 and (self.max_workers is None or workers <= self.max_workers)

    def may_have(self, workers: int) -> bool:
        """Whether the task may run on that many workers at all (0 is always legal)."""
        return self.may_stay(workers) or any(other.may_have(workers) for other in self.others)

    def legal_layouts(self, workers: int) -> list[int]:
        """The layouts in which the task may have so many workers; the present one first."""
        own = [0] if self.may_stay(workers) else []
        return own + [n for n, other in enumerate(self.others, 1) if workers and other.may_have(workers)]

    @cached_property
    def floor_point(self) -> int:
        """The fewest workers that meet the floor; 0 where there is none or no legal number meets it."""
        units = (self.unit, *(other.shape.workers for other in self.others))
        points = [-(-self.floor // unit) * unit for unit in units]
        return min((point for point in points if self.may_have(point)), default=0)

    @cached_property
    def least_that_achieves(self) -> int | None:
        """The fewest workers, no fewer than the floor, that achieve anything; None: none do."""
        own = (self.curve, self.may_stay)
        curves = (own, *((other.curve, other.may_have) for other in self.others))
        found = (
            next((at for at, flops in curve.rounded() if flops and at >= self.floor and may_have(at)), None)
            for curve, may_have in curves
        )
        return min((at for at in found if at is not None), default=None)

    def waf(self, workers: int, layout: int = 0) -> Fraction:
        """F(t, workers) in a layout: weighted achieved FLOP/s, exact."""
        curve = self.others[layout - 1].curve if layout else self.curve
        return Fraction(self.weight) * Fraction(curve(workers)) if workers >= self.min_workers else Fraction(0)


@dataclass(frozen=True)
class Pool:
    """The nodes with one type of GPU: their slots, and their seats as in Problem."""

    gpu: str
    workers: int
    seats: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Problem:
    """The whole problem. `tasks` stand in the canonical order: ties are decided from the first to the last.

    `workers`: n', after the event. `d_running_us`: expected time to the next failure at n'.
    `d_transition_us`: expected duration of a transition. `churn_us`: see the module; 0 = off.
    The durations only need one common unit; microseconds is the coordinator's.
    `seats`: (slots, how many nodes have them), rising: all tensor-parallel groups of a plan find room there; empty =
    not asked (seating.py).
    `pools`: of which `workers` is the sum, `seats` are in them; empty where there is one type of GPU.
    """

    workers: int
    d_running_us: Number
    d_transition_us: Number
    tasks: tuple[TaskProblem, ...]
    churn_us: Number = 0
    seats: tuple[tuple[int, int], ...] = ()
    pools: tuple[Pool, ...] = ()

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

    def transition_of(self, task: TaskProblem) -> Number:
        """D_transition for this task."""
        return self.d_transition_us if task.d_transition_us is None else task.d_transition_us

    def price(self, task: TaskProblem, workers: int, layout: int) -> Fraction:
        """What the change costs, as time of the task's present work."""
        if not layout and workers == task.workers and not task.faulty:
            return Fraction(0)
        return Fraction(self.time_of(task, workers, layout)) + (0 if task.faulty else Fraction(self.churn_us))

    def time_of(self, task: TaskProblem, workers: int, layout: int) -> Number:
        """How long a change takes; asked only where something changes."""
        transition = self.transition_of(task)
        move, reshape, restart = task.prices.over(transition)
        if not task.waf(workers, layout):
            return restart
        if layout:
            return reshape
        return transition if task.faulty else move

    def gain_in(self, task: TaskProblem, workers: int, layout: int) -> Fraction:
        """G(t, x -> workers in this layout), exact: weighted FLOP/s times the unit of the durations."""
        lost = task.waf(task.workers) * self.price(task, workers, layout)
        return task.waf(workers, layout) * Fraction(self.d_running_us) - lost

    def layout_for(self, task: TaskProblem, workers: int) -> int:
        """The best layout for so many workers; the present one if it is as good, else the first that achieves most."""
        if not task.others:
            return 0
        legal = task.legal_layouts(workers)
        if not any(legal):
            return 0
        # All others cost the same to get to: of those the one that achieves most.
        counts = workers >= task.min_workers and task.weight > 0
        other = max([one for one in legal if one], key=lambda one: (task.others[one - 1].curve(workers) * counts, -one))
        if 0 not in legal:
            return other
        # Nearly always float64 can tell them apart.
        here, there = (self._nearly(task, workers, one) for one in (0, other))
        if abs(here[0] - there[0]) > 1e-9 * (here[1] + there[1]):
            return 0 if here[0] > there[0] else other
        return other if self.gain_in(task, workers, other) > self.gain_in(task, workers, 0) else 0

    def _nearly(self, task: TaskProblem, workers: int, layout: int) -> tuple[float, float]:
        """`gain_in` in float64, and the sum of its terms' sizes."""
        weight, curve = float(task.weight), task.others[layout - 1].curve if layout else task.curve
        wins = float(curve(workers)) * weight * float(self.d_running_us) if workers >= task.min_workers else 0.0
        had = float(task.curve(task.workers)) * weight if task.workers >= task.min_workers else 0.0
        if not layout and workers == task.workers and not task.faulty:
            return wins, wins
        lost = had * (float(self.time_of(task, workers, layout)) + (0.0 if task.faulty else float(self.churn_us)))
        return wins - lost, wins + lost

    def gain(self, task: TaskProblem, workers: int) -> Fraction:
        """G(t, x -> workers) in the best layout, exact."""
        return self.gain_in(task, workers, self.layout_for(task, workers))
