"""Measures how long this process itself computed its micro-batches, without the time that it waited for others.

Rules
-----
* The time of a micro-batch is the loop's, from where it is given out until the loop asks for the next: reading data,
  forward, backward. Reductions, agreements, the optimizer's step, checkpoints lie outside.
* What the thread was ready to run in and had no CPU does not count (Linux' Documentation/scheduler/sched-stats): on a
  machine that is too busy it measures other processes, not this one's speed. To sleep and to wait for a device
  or a disk does count.
* Nor does what the loop has declared to be something else (`apart`).
* Two looks at the clock and two reads of an open file per micro-batch: some 5 microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from unicrond.agents.protocol.marks import now_us

_SCHEDSTAT = "/proc/thread-self/schedstat"


class ComputeTime:
    """The compute time of one iteration's micro-batches, in seconds of the thread that computes them."""

    def __init__(self) -> None:
        self._file: int | None
        try:
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no Linux, or one that does not tell
            self._file = None
        self._began_us: int | None = None
        self._apart_us = 0
        self.compute_us = 0
        self.micro_batches = 0

    def clear(self) -> None:
        """Begin another iteration."""
        self._began_us = None
        self._apart_us = self.compute_us = self.micro_batches = 0

    def begin(self) -> None:
        """Start the clock: micro-batches are given out."""
        self._began_us, self._apart_us = now_us() - self._waited_us(), 0

    def end(self, micro_batches: int) -> None:
        """Add the time since `begin`, in which so many micro-batches were computed."""
        if self._began_us is not None:
            self.compute_us += max(0, now_us() - self._waited_us() - self._began_us - self._apart_us)
            self.micro_batches += micro_batches
            self._began_us = None

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Exclude the time of work outside of a micro-batch."""
        began_us = now_us() - self._waited_us()
        try:
            yield
        finally:
            self._apart_us += now_us() - self._waited_us() - began_us

    def _waited_us(self) -> int:
        """Return for how long the thread has waited for a CPU in its life."""
        if self._file is None:
            return 0
        try:
            return int(os.pread(self._file, 96, 0).split()[1]) // 1000
        except (OSError, ValueError, IndexError):
            return 0
