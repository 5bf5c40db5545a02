"""Measures how long this process itself computed its micro-batches, without the time that it waited for others.

Rules
-----
* The time of a micro-batch is the loop's, from where it is given out until the loop asks for the next: reading data,
  forward, backward. Reductions, agreements, the optimizer's step, checkpoints lie outside.
* What the thread was ready to run in and had no CPU does not count (Linux' Documentation/scheduler/sched-stats): on a
  machine that is too busy it measures other processes, not this one's speed. To sleep and to wait for a device
  or a disk does count.
* Nor does what the loop has declared to be something else (`apart`).
* The time by the clock (`clock_us`) is measured beside it: what the others wait for, whatever the reason.
* Two looks at the clock and two reads of an open file per micro-batch: some 5 microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from unicrond.agents.protocol.marks import now_us

_SCHEDSTAT = "/proc/thread-self/schedstat"


class ComputeTime:
    """The compute time of one iteration's micro-batches, of the thread that computes them. `calls`: so many times some
    of them were given out together."""

    def __init__(self) -> None:
        self._file: int | None
        try:
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no Linux, or one that does not tell
            self._file = None
        self._began: tuple[int, int] | None = None
        self._apart = (0, 0)
        self.clear()

    def clear(self) -> None:
        """Begin another iteration."""
        self._began, self._apart = None, (0, 0)
        self.compute_us = self.clock_us = self.micro_batches = self.calls = 0

    def begin(self) -> None:
        """Start the clock: micro-batches are given out."""
        self._began, self._apart = self._read(), (0, 0)

    def end(self, micro_batches: int) -> None:
        """Add the time since `begin`, in which so many micro-batches were computed."""
        if self._began is not None:
            clock_us, waited_us = (
                now - began - apart for now, began, apart in zip(self._read(), self._began, self._apart, strict=True)
            )
            self.clock_us += max(0, clock_us)
            self.compute_us += max(0, clock_us - waited_us)
            self.micro_batches += micro_batches
            self.calls += 1
            self._began = None

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Exclude the time of work outside of a micro-batch."""
        began = self._read()
        try:
            yield
        finally:
            clock_us, waited_us = self._read()
            self._apart = self._apart[0] + clock_us - began[0], self._apart[1] + waited_us - began[1]

    def pace_us(self, fill: int) -> int:
        """Return the time by the clock for a micro-batch, 0 where none was computed. `fill`: the micro-batches' time by
        which a call takes longer than its micro-batches (`lifecycle/programme.py`)."""
        return self.clock_us // (self.micro_batches + fill * self.calls) if self.calls else 0

    def _read(self) -> tuple[int, int]:
        """Return the clock, and for how long the thread has waited for a CPU in its life; microseconds."""
        return now_us(), self._waited_us()

    def _waited_us(self) -> int:
        """Return for how long the thread has waited for a CPU in its life."""
        if self._file is None:
            return 0
        try:
            return int(os.pread(self._file, 96, 0).split()[1]) // 1000
        except (OSError, ValueError, IndexError):
            return 0
