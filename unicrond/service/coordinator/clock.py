"""The shell's two clocks (a simulation brings its own), and deadlines on the event loop's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping


class Clock:
    """The process's own clocks, in microseconds."""

    def monotonic_us(self) -> int:
        """Return a time that never steps."""
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        """Return the time since the epoch; it only dates what is written."""
        return time.time_ns() // 1000


CLOCK = Clock()


class Timers:
    """Arms deadlines. `on_deadline`: called with the name of a deadline that has passed."""

    def __init__(self, on_deadline: Callable[[str], None]) -> None:
        self._on_deadline = on_deadline
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def arm(self, standing: Mapping[str, int]) -> None:
        """Replace the deadlines: name -> length in microseconds. One that is already armed goes on."""
        for name in [name for name in self._timers if name not in standing]:
            self._timers.pop(name).cancel()
        for name, length_us in standing.items():
            if name not in self._timers:
                loop = asyncio.get_running_loop()
                self._timers[name] = loop.call_later(length_us / 1e6, self._on_deadline, name)
