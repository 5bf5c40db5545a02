"""The progress marks of workers, as agents/trainer/detection/observing.py writes them; agents watch workers by them.

The baseline (how long an iteration may last) and the watch that looks at the marks (agents/shell/progress_watch.py) are
the real ones."""

from __future__ import annotations

from collections.abc import Callable

from unicrond.agents.protocol.marks import Mark
from unicrond.agents.trainer.detection.baseline import Baseline
from unicrond.events.vocabulary import Phase

#: Nothing is late before that; and the limit before the baseline has times.
_FLOOR_US = 2_000_000
_START_US = 20_000_000


class ReplicaProgress:
    """The position of a replica's main thread; its shards take the same turns. `interval`: iterations between
    checkpoints."""

    def __init__(self, now_us: Callable[[], int], interval: int) -> None:
        self._now_us = now_us
        self._interval = interval
        self._baseline = Baseline(floor_us=_FLOOR_US, start_us=_START_US)
        self._phase: Phase = "start"
        self._generation = self._iteration = self._micro_batch = self._enter_count = self._leave_count = 0
        self._boundary_us = self._limit_us = 0
        self._changed_us = now_us()

    @property
    def mark(self) -> Mark:
        """Return the present mark."""
        return Mark(
            self._phase, self._generation, self._iteration, self._micro_batch, self._enter_count, self._leave_count,
            self._boundary_us, self._limit_us, self._changed_us,
        )  # fmt: skip

    def regrouped(self, generation: int, *, share: int, joins: bool) -> None:
        """Note another group. `share`, `joins`: see Baseline.reset."""
        self._generation = generation
        self._enter_count = self._leave_count = self._limit_us = 0
        self._baseline.reset(share=share, joins=joins)
        self._changed_us = self._now_us()

    def baseline_words(self) -> list[int]:
        """Return the baseline's times for a newcomer; they travel with the state."""
        return self._baseline.words()

    def inherit(self, words: list[int]) -> None:
        """Adopt the baseline that came with a received state."""
        self._baseline.inherit(words)

    def begin_iteration(self, iteration: int) -> None:
        """Begin an iteration, or continue it in another group."""
        self._iteration, self._micro_batch = iteration, 0
        self._boundary_us = self._changed_us = self._now_us()
        self._limit_us = self._baseline.limit_us(checkpoint=self._is_saving(iteration))

    def ending(self, iteration: int, *, writes: bool) -> None:
        """Note that all iterations are computed, and the last state is written."""
        self.begin_iteration(iteration)
        self._limit_us = self._baseline.end_limit_us(0 if writes else None)

    def committed(self, iteration: int) -> None:
        """Record that the iteration is over."""
        self._baseline.add(self._now_us() - self._boundary_us, checkpoint=self._is_saving(iteration))

    def phase(self, phase: Phase) -> None:
        """Enter a phase."""
        self._phase = phase
        self._changed_us = self._now_us()

    def idle(self) -> None:
        """Note that no iteration runs: nothing is late."""
        self._limit_us = 0
        self._changed_us = self._now_us()

    def working(self, micro_batch: int) -> None:
        """Note that a micro-batch begins."""
        self._phase, self._micro_batch = "forward", micro_batch
        self._changed_us = self._now_us()

    def entering(self) -> None:
        """Enter a collective."""
        self._enter_count += 1
        self._changed_us = self._now_us()

    def leaving(self) -> None:
        """Leave the collective."""
        self._leave_count = self._enter_count
        self._changed_us = self._now_us()

    def _is_saving(self, iteration: int) -> bool:
        """Return whether the iteration's time includes the checkpoint of the one before."""
        return bool(self._interval) and iteration > 1 and (iteration - 1) % self._interval == 0
