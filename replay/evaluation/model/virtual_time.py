"""A virtual clock: events happen in order of their times, and nothing happens between them.

Two events at one time happen in the order in which they were scheduled, so equal seeds give equal runs."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
DAY_US = 24 * HOUR_US


def to_us(seconds: float) -> int:
    """Convert seconds to whole microseconds."""
    return round(seconds * SECOND_US)


@dataclass(order=True)
class Timer:
    """An action scheduled for `at_us`, unless it is cancelled before."""

    at_us: int
    order: int
    action: Action | None = field(compare=False)

    def cancel(self) -> None:
        """Cancel the action: it will not run."""
        self.action = None


class VirtualClock:
    """The time of a simulated run. `now_us` moves from one scheduled action to the next, never by itself."""

    def __init__(self, now_us: int = 0) -> None:
        self.now_us = now_us
        self._heap: list[Timer] = []
        self._scheduled = 0

    def after(self, delay_us: int, action: Action) -> Timer:
        """Schedule `action` for `delay_us` (>= 0) from now."""
        return self.at(self.now_us + max(0, delay_us), action)

    def at(self, at_us: int, action: Action) -> Timer:
        """Schedule `action` for `at_us`; one in the past runs next."""
        self._scheduled += 1
        timer = Timer(max(at_us, self.now_us), self._scheduled, action)
        heapq.heappush(self._heap, timer)
        return timer

    def run(self, until_us: int) -> None:
        """Run everything scheduled up to and with `until_us`, which is the time afterwards."""
        while self._heap and self._heap[0].at_us <= until_us:
            timer = heapq.heappop(self._heap)
            if timer.action is not None:
                self.now_us = timer.at_us
                timer.action()
        self.now_us = max(self.now_us, until_us)
