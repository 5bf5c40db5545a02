"""The rule of speeds: micro-batches are dealt by how long each replica takes for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unicrond.agents.trainer.lifecycle.programme import best_counts, duration

#: Name -> sentence; part of `invariants.RULES`.
SPEED_RULES: dict[str, str] = {
    "slow_is_dealt_less": "After 30 iterations at the same speeds no deal is shorter by a tenth than the present one.",
}
#: Iterations until a group deals by its speeds, which nothing disturbs here, and seconds: several short iterations are
#: one sample.
_ITERATIONS = 30
_SECONDS = 5.0
_SLACK = 1.1
#: Parts of a second that speeds are compared in.
_PARTS = 1000


class _Steady(NamedTuple):
    """Speeds that have not changed in a group since a time, and its iterations since then."""

    paces_s: tuple[float, ...]
    since_s: float
    iterations: int


class SpeedRecord:
    """The speeds of all groups' members."""

    def __init__(self) -> None:
        self._steady: dict[tuple[str, int], _Steady] = {}

    def slow_is_dealt_less(
        self, group: tuple[str, int], counts: Sequence[int], paces_s: tuple[float, ...], now_s: float
    ) -> str:
        """Check an iteration of a group, its task and generation. `paces_s`: by replica, how long it takes for a
        micro-batch now."""
        steady = self._steady.get(group, _Steady((), now_s, 0))
        if steady.paces_s != paces_s:
            steady = _Steady(paces_s, now_s, 0)
        self._steady[group] = steady = steady._replace(iterations=steady.iterations + 1)
        if steady.iterations < _ITERATIONS or now_s - steady.since_s < _SECONDS or len(counts) != len(paces_s):
            return ""
        best = best_counts([max(1, round(pace_s * _PARTS)) for pace_s in paces_s], sum(counts))
        if duration(counts, paces_s) <= _SLACK * duration(best, paces_s):
            return ""
        paces = ", ".join(f"{1000 * pace_s:.0f}" for pace_s in paces_s)
        return f"{group[0]} deals {tuple(counts)} at {paces} ms for {steady.iterations} iterations; {best} is shorter"
