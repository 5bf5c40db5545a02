"""Decides when a training program logs its loss and pace: at its first iteration, then at most every 10 s. Pure."""

from __future__ import annotations

from collections.abc import Callable

#: Between two lines in the log, at least.
LOG_EVERY_S = 10.0


class ProgressLog:
    """The numbers of a program's log lines: of this process's first iteration, then of the first one after each
    LOG_EVERY_S. `clock`: monotonic seconds. Every process counts, so that a new leader goes on at once; the hook has
    the leader alone write.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s: float | None = None
        self._count = 0

    def after(self, loss: float) -> dict[str, float]:
        """Return the numbers of a log line, none where it is too soon. `iteration_s`: mean since the line before."""
        now_s, last_s = self._clock(), self._last_s
        self._count += 1  # not by their numbers: a state from before may have been taken up
        if last_s is not None and now_s - last_s < LOG_EVERY_S:
            return {}
        count, self._count, self._last_s = self._count, 0, now_s
        return {"loss": loss} if last_s is None else {"loss": loss, "iteration_s": (now_s - last_s) / count}
