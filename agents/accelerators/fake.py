"""A driver of GPUs that do not exist, for drills and tests on CPUs: it reports only what a caller orders."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from unicrond.agents.accelerators.driver import GpuReading, XidEvent


class FakeDriver:
    """A fake behind the same interface as NVML (`driver.py`). `slots`: the name of each slot's GPU."""

    def __init__(self, slots: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(slots))
        self.gpu_of_slot = tuple(self.names.index(name) for name in slots)
        self.models = ("",) * len(self.names)
        self.readings = [GpuReading() for _ in self.names]
        self._events: queue.SimpleQueue[tuple[int, XidEvent] | None] = queue.SimpleQueue()

    def report(self, gpu: int, event: XidEvent) -> None:
        """Have a GPU report an event. May be called from any thread."""
        self._events.put((gpu, event))

    def read(self, gpu: int) -> GpuReading:
        """Return the present reading; see Driver."""
        return self.readings[gpu]

    def wait(self, timeout_s: float) -> tuple[int, XidEvent] | None:
        """Wait for an event; see Driver."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Wake the waiting thread; see Driver."""
        self._events.put(None)

    def close(self) -> None:
        """Close nothing; see Driver."""
