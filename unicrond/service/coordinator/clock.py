"""The shell's two clocks; a simulation brings its own."""

from __future__ import annotations

import time


class Clock:
    """The process's own clocks, in microseconds."""

    def monotonic_us(self) -> int:
        """Return a time that never steps."""
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        """Return the time since the epoch; it only dates what is written."""
        return time.time_ns() // 1000


CLOCK = Clock()
