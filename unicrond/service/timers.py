"""Deadlines on the event loop's clock: those that stand, armed; each is reported once, when it has passed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping


class Timers:
    """`passed`: called with the name of a deadline that has passed."""

    def __init__(self, passed: Callable[[str], None]) -> None:
        self._passed = passed
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def arm(self, standing: Mapping[str, int]) -> None:
        """From now on these stand, name -> length in microseconds, and no others. One that stands already goes on."""
        for name in [name for name in self._timers if name not in standing]:
            self._timers.pop(name).cancel()
        for name, length_us in standing.items():
            if name not in self._timers:
                loop = asyncio.get_running_loop()
                self._timers[name] = loop.call_later(length_us / 1e6, self._passed, name)
