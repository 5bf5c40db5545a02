"""A driver of GPUs that are not there: they report nothing but what they are told to. For drills and tests on CPUs."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from agents.accelerators.readings import Reading, XidSeen


class FakeDriver:
    """Behind the same interface as NVML (`driver.py`). `slots`: the name of each slot's GPU."""

    def __init__(self, slots: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(slots))
        self.gpu_of_slot = tuple(self.names.index(name) for name in slots)
        self.models = ("",) * len(self.names)
        self.readings = [Reading() for _ in self.names]
        self._events: queue.SimpleQueue[tuple[int, XidSeen] | None] = queue.SimpleQueue()

    def report(self, gpu: int, seen: XidSeen) -> None:
        """Have a GPU report an event. From any thread."""
        self._events.put((gpu, seen))

    def read(self, gpu: int) -> Reading:
        """See Driver."""
        return self.readings[gpu]

    def wait(self, timeout_s: float) -> tuple[int, XidSeen] | None:
        """See Driver."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """See Driver."""
        self._events.put(None)

    def close(self) -> None:
        """See Driver."""
