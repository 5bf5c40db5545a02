"""The plan problem: the question that every re-plan answers.

    maximise   sum_t G(t, x -> x')     subject to   sum_t x'_t <= n'
    G(t, x -> x') = F(t, x') * D_running - 1[x' != x or t is faulty] * F(t, x) * D_transition
                                         - 1[x' != x and t is healthy] * F(t, x) * D_churn
    F(t, x) = w(t) * T(t, x)  where x meets the task's minimum, else 0       (Unicron, arXiv 2401.00134)

Rules
-----
* n' counts the workers that are left *after* the event; x is what a task had *before* it.
* A task may take 0 workers, or any multiple of its `unit` up to its cap.
* A floor is unmet where x' < floor. The number of unmet floors is minimised first, the objective second.
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

if TYPE_CHECKING:  # to read a log needs curves and no numpy
    import numpy as np
    from numpy.typing import NDArray

Number: TypeAlias = int | float


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
class TaskProblem:
    """One task's part of the problem.

    `workers`: x, before the event. `faulty`: the event hit one of its workers. `min_workers`: F is 0 below.
    `max_workers`: the cap, None for none. `floor`: see the module. `unit`: tp * pp, workers come in
    multiples of it. `throughput`: T(x) in FLOP/s, as a Curve or as the tuple T(0), T(1), ...
    `d_transition_us`: the task's own, where it is not the problem's.
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

    def __post_init__(self) -> None:
        if not 0 <= self.weight < inf:
            raise ProblemError(f"task {self.name}: weight is {self.weight}; give a finite number >= 0")
        for field in ("workers", "min_workers", "max_workers", "floor"):
            value = getattr(self, field)
            if value is not None and value < 0:
                raise ProblemError(f"task {self.name}: {field} is {value}; give a number >= 0")
        if self.unit < 1:
            raise ProblemError(f"task {self.name}: unit is {self.unit}; give tp * pp, at least 1")
        if self.d_transition_us is not None and not 0 <= self.d_transition_us < inf:
            told = f"d_transition_us is {self.d_transition_us}"
            raise ProblemError(f"task {self.name}: {told}; give a finite number >= 0")

    @cached_property
    def curve(self) -> Curve:
        """T as a Curve."""
        return self.throughput if isinstance(self.throughput, Curve) else Curve.dense(self.throughput)

    def may_have(self, workers: int) -> bool:
        """Whether the task may run on that many workers at all (0 is always legal)."""
        return workers % self.unit == 0 and (self.max_workers is None or workers <= self.max_workers)

    @cached_property
    def floor_point(self) -> int:
        """The fewest workers that meet the floor; 0 where there is none or no legal number meets it."""
        point = -(-self.floor // self.unit) * self.unit
        return point if self.may_have(point) else 0

    def waf(self, workers: int) -> Fraction:
        """F(t, workers): weighted achieved FLOP/s, exact."""
        return Fraction(self.weight) * Fraction(self.curve(workers)) if workers >= self.min_workers else Fraction(0)


@dataclass(frozen=True)
class Problem:
    """The whole problem. `tasks` stand in the canonical order: ties are decided from the first to the last.

    `workers`: n', after the event. `d_running_us`: expected time to the next failure at n'.
    `d_transition_us`: expected duration of a transition. `churn_us`: see the module; 0 = off.
    The durations only need one common unit; microseconds is the coordinator's.
    """

    workers: int
    d_running_us: Number
    d_transition_us: Number
    tasks: tuple[TaskProblem, ...]
    churn_us: Number = 0

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

    def transition_of(self, task: TaskProblem) -> Number:
        """D_transition for this task."""
        return self.d_transition_us if task.d_transition_us is None else task.d_transition_us

    def gain(self, task: TaskProblem, workers: int) -> Fraction:
        """G(t, x -> workers), exact: weighted FLOP/s times the unit of the durations."""
        lost = Fraction(0)
        if task.faulty or workers != task.workers:
            lost += Fraction(self.transition_of(task))
        if not task.faulty and workers != task.workers:
            lost += Fraction(self.churn_us)
        return task.waf(workers) * Fraction(self.d_running_us) - task.waf(task.workers) * lost
