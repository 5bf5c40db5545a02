"""The shell's two clocks; a simulation brings its own."""

from __future__ import annotations

import time


class Clock:
    """In microseconds."""

    def monotonic_us(self) -> int:
        """Never steps."""
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        """Since the epoch; only dates what is written."""
        return time.time_ns() // 1000


CLOCK = Clock()
