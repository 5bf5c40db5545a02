"""Detects spikes: a replica's loss or gradient norm far above those of all replicas in the last iterations.

Rules
-----
* Usual is the median of the window, over all replicas; the noise is the median distance from it.
* A value spikes if it is not finite, or above the usual by more than NOISE times the noise and by more than `rise`
  times the usual. Values far below are no news.
* If some replicas spike and others do not, those are reported. If all do, it is the data or the optimisation: none
  is blamed, unless there is but one.
* The same is reported again only after QUIET iterations. Spikes do not enter the window.

Pure: values come in, suspicions go out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

WINDOW = 64
ENOUGH = 20
NOISE = 10.0
QUIET = 50


class Spike(NamedTuple):
    """A value that is far too high. `rank`: whose, None: all have it. `usual`: what such values usually are."""

    rank: int | None
    value: float
    usual: float


class Spikes:
    """Detects spikes of one kind of value. `rise`: see the module; healthy gradient norms leap severalfold, losses do
    not."""

    def __init__(self, rise: float) -> None:
        self._rise = rise
        self._window: deque[tuple[float, ...]] = deque(maxlen=WINDOW)
        self._last_report: dict[int | None, int] = {}
        self._iteration = 0

    def check(self, values: Sequence[float]) -> list[Spike]:
        """Check one iteration's values, in rank order; return the spikes to be reported."""
        self._iteration += 1
        window = [value for row in self._window for value in row]
        if len(self._window) < ENOUGH:
            if all(math.isfinite(value) for value in values):
                self._window.append(tuple(values))
            return []
        usual = median(window)
        limit = usual + max(NOISE * median(abs(value - usual) for value in window), self._rise * abs(usual))
        high = [rank for rank, value in enumerate(values) if not value <= limit]
        if not high:
            self._window.append(tuple(values))
            return []
        ranks: list[int | None] = [None] if 1 < len(high) == len(values) else [*high]
        spikes = []
        for rank in ranks:
            if self._iteration - self._last_report.get(rank, -QUIET) >= QUIET:
                self._last_report[rank] = self._iteration
                spikes.append(Spike(rank, values[high[0] if rank is None else rank], usual))
        return spikes
