"""Deadlines on the event loop's clock; each is reported once, when it has passed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping


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
