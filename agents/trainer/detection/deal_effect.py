"""Measures what dealing by speed (`lifecycle/deal.py`) has brought: iterations before it, and since.

Rules
-----
* Before it: the plain iterations of this group that were dealt evenly. Since: those of the present deal, but the first
  SETTLING, whose data is loaded anew. Of either the median of the last ones counts, where there are ENOUGH.
* Only an iteration that was computed as dealt counts, not one in which work of a lost replica was done again.
* The ideal is the time before, less what the deal cuts by the measured speeds if nothing else changes and nobody waits
  for anybody's running sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from unicrond.agents.trainer.lifecycle.deal import Deal
from unicrond.agents.trainer.lifecycle.programme import ORDINARY, best_counts, duration
from unicrond.events.vocabulary import ReplicaDeal

SETTLING = 2
ENOUGH = 5
#: So many iterations after a deal it is said what it has brought.
_TELLS_AFTER = 10
_RECENT = 20


class DealEffect:
    """The iterations of one group, under its deals."""

    def __init__(self) -> None:
        self.regrouped()

    def regrouped(self) -> None:
        """Begin anew, for another group."""
        self._counts: tuple[int, ...] = ()
        self._even: tuple[int, ...] = ()
        self._before_us = 0
        self._iterations = 0
        self._durations: deque[int] = deque(maxlen=_RECENT)

    def add(self, counts: tuple[int, ...], deal: Deal, plain_us: int) -> bool:
        """Add a committed iteration in which replicas computed `counts` micro-batches, dealt by `deal`. `plain_us`: how
        long it took, 0 if that says nothing. Return whether it is known from now on what the deal has brought."""
        if counts != deal.counts:
            return False
        if counts != self._counts:
            self._even = best_counts([1] * len(counts), sum(counts))
            if self._counts == self._even:
                self._before_us = self._middle_us()
            self._counts, self._iterations = counts, 0
            self._durations.clear()
        self._iterations += 1
        if self._iterations > SETTLING and plain_us:
            self._durations.append(plain_us)
        return self._is_uneven and self._iterations == _TELLS_AFTER

    def of(self, rank: int, deal: Deal) -> ReplicaDeal | None:
        """Return what the replica is dealt, and what that has brought so far; None where all is even."""
        if not self._is_uneven or self._counts != deal.counts:
            return None
        cut_us = self._cut_us(deal) if self._before_us else 0
        return ReplicaDeal(
            micro_batches=sum(self._counts),
            dealt=self._counts[rank],
            dealt_evenly=self._even[rank],
            iteration_us_before=self._before_us,
            iteration_us=self._middle_us(),
            ideal_us=max(0, self._before_us - cut_us),
        )

    @property
    def _is_uneven(self) -> bool:
        return self._counts != self._even

    def _middle_us(self) -> int:
        return int(median(self._durations)) if len(self._durations) >= ENOUGH else 0

    def _cut_us(self, deal: Deal) -> int:
        """Return by how much the deal shortens the computation of an iteration, by the measured speeds."""
        times: Sequence[float] = [deal.ordinary_us * factor / ORDINARY for factor in deal.speeds.factors]
        return int(duration(self._even, times) - duration(self._counts, times))
