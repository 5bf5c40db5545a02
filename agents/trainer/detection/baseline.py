"""Learns how long an iteration of a task usually takes, and decides when one is late and when all have become slow.

Rules
-----
* Only plain iterations count: not the first WARM_UP ones of a generation, not one in which a checkpoint was written,
  not one in which the group changed. A new generation begins a new baseline: other replicas, other times.
* The usual time is the median of the last WINDOW plain iterations: a few long ones do not move it.
* Late (a hang): longer than HANG times the usual, and longer than twice the longest of the window, so that a noisy
  machine makes itself patient; never less than `floor_us`. An iteration with a checkpoint is given three times the
  longest such one in addition.
* When training has ended, all are given LAST_WRITE_US in addition, and the writer of the last state six times what
  such a write took at most, if that is longer (another may be on its way), or `start_us` where none was written: no
  other member trains any more, patience costs little, and storage may stall.
* Before the usual time is known in a generation, the task's is used: what its members knew before, or what came with
  the state that they took over; longer by as much as a replica has more to compute now, never shorter. While one
  replica joins, its first iterations are given what a first iteration took in this task at most. Where nothing is
  known at all, `start_us`.
* Slow (a degradation): the median of the last RECENT iterations is above SLOW times the lowest median of a whole
  window since the generation began, and by more than three median deviations. Told once; again when it has become
  worse by as much, and after it was over.

Pure: durations come in, limits go out. Durations in microseconds.
"""

from __future__ import annotations

from collections import deque
from statistics import median, median_low

WARM_UP = 3
WINDOW = 32
#: Fewer plain iterations say nothing yet.
ENOUGH = 5
RECENT = 16
HANG = 3
SLOW = 1.1
_OVER = 1.05
_NOISE = 3
_CHECKPOINT = 3
_LAST_WRITE = 6
LAST_WRITE_US = 30_000_000
_WORDS = 4


class Baseline:
    """The usual duration of a task's iterations, as one worker measures it; all members measure nearly the same."""

    def __init__(self, *, floor_us: int, start_us: int) -> None:
        self._floor_us = floor_us
        self._start_us = start_us
        self._durations: deque[int] = deque(maxlen=WINDOW)
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._iterations = 0
        self._previous_us = self._previous_longest_us = 0
        self._first_us = 0
        self._share = 0
        self._is_first = True
        self._joins = False
        self._checkpoint_us = 0
        self._best_us = 0.0
        self._noise_us = 0.0
        self._reported_us = 0.0

    @property
    def usual_us(self) -> int:
        """Return the usual duration; 0: not known yet."""
        return int(median(self._durations)) if len(self._durations) >= ENOUGH else 0

    @property
    def best_us(self) -> int:
        """Return what a degradation is measured against; 0: not known yet."""
        return int(self._best_us)

    def reset(self, *, share: int = 0, joins: bool = False) -> None:
        """Begin a new baseline, for another group. `share`: micro-batches that a replica has to compute now, 0: as
        before. `joins`: there are newcomers in it."""
        if self.usual_us:
            self._previous_us, self._previous_longest_us = self.usual_us, max(self._durations)
        if share and self._share and self._previous_us:
            self._previous_us = self._previous_us * max(share, self._share) // self._share
            self._previous_longest_us = self._previous_longest_us * max(share, self._share) // self._share
        self._share = share or self._share
        self._joins = joins
        self._is_first = self._is_first and not self._previous_us
        self._durations.clear()
        self._recent.clear()
        self._iterations = 0
        self._best_us = self._noise_us = self._reported_us = 0.0

    def words(self) -> list[int]:
        """Return what a newcomer inherits: usual and longest time, a first iteration's, microseconds, and the
        micro-batches of a replica; zeros: nothing is known."""
        longest_us = max(self._durations, default=0)
        times = (self.usual_us, longest_us) if self.usual_us else (self._previous_us, self._previous_longest_us)
        return [*times, self._first_us, self._share]

    def inherit(self, words: object) -> None:
        """Take another's `words`, where this one knows nothing; anything else is ignored."""
        if self.usual_us or self._previous_us or not isinstance(words, list) or len(words) != _WORDS:
            return
        if not all(type(word) is int and word >= 0 for word in words):
            return
        share = self._share
        self._previous_us, self._previous_longest_us, self._first_us, self._share = words
        self._is_first = False
        self.reset(share=share, joins=True)

    def add(self, duration_us: int, *, checkpoint: bool = False) -> None:
        """Add an iteration of this generation, which has ended. `checkpoint`: one was written in it."""
        if checkpoint:
            self._checkpoint_us = max(self._checkpoint_us, duration_us)
            return
        self._iterations += 1
        if self._iterations <= WARM_UP:
            if self._is_first:
                self._first_us = max(self._first_us, duration_us)
            return
        self._durations.append(duration_us)
        self._recent.append(duration_us)

    def limit_us(self, *, checkpoint: bool = False) -> int:
        """Return how long the next iteration may last before it is late."""
        usual_us = self.usual_us
        if usual_us:
            limit_us = max(HANG * usual_us, 2 * max(self._durations), self._floor_us)
        elif self._previous_us:
            limit_us = max(HANG * self._previous_us, 2 * self._previous_longest_us, self._floor_us)
            if self._joins and self._iterations < WARM_UP:
                limit_us += self._first_us
        else:
            return self._start_us
        if not checkpoint:
            return limit_us
        return limit_us + (_CHECKPOINT * self._checkpoint_us or self._start_us)

    def end_limit_us(self, longest_us: int | None) -> int:
        """Return how long the end of training may last. `longest_us`: what writing a state took at most, 0: none was
        written, None: others write."""
        if longest_us == 0:
            return self.limit_us() + self._start_us
        return self.limit_us() + max(LAST_WRITE_US, _LAST_WRITE * (longest_us or 0))

    def collective_timeout_us(self) -> int:
        """Return a collective library's own time-out, the last resort: well above every limit, far below half an
        hour."""
        return max(10 * self.limit_us(), 30_000_000) if self.usual_us or self._previous_us else self._start_us

    def detect_slowdown(self) -> int:
        """Return the recent duration, once, when the iterations have become slow; else 0."""
        if len(self._durations) < WINDOW:
            return 0
        recent_us, window_us = median_low(self._recent), median(self._durations)
        if not self._best_us or window_us < self._best_us:
            self._best_us = window_us
            noise_us = median(abs(duration - window_us) for duration in self._durations)
            self._noise_us = max(self._noise_us, noise_us)
        if recent_us <= _OVER * self._best_us:
            self._reported_us = 0.0
        reference_us = max(self._best_us, self._reported_us)
        if recent_us <= max(SLOW * reference_us, reference_us + _NOISE * self._noise_us):
            return 0
        self._reported_us = recent_us
        return int(recent_us)
