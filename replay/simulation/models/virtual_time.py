"""An asyncio loop whose time jumps to the next event; no thread, no file, no clock of the machine.

Rules
-----
* `time()` is the only time there is. When nothing is ready it jumps to the earliest timer.
* The same calls in the same order give the same run: the ready queue is first in, first out; timers of one moment run
  in the order in which they were set.
* Work for a thread (`asyncio.to_thread`) is done in the loop, after a virtual delay.
* Nothing ready and no timer is a deadlock of the simulation itself: it raises, it never hangs.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from unicrond.service.coordinator.clock import Clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
EPOCH_US = 1_700_000_000 * 1_000_000


class Deadlock(RuntimeError):
    """Nothing will ever happen again: nothing is ready, and no timer runs."""


class _Jump(selectors.BaseSelector):
    """Stands in for the selector of an asyncio loop: holds the time, and what asyncio registers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Store the key; nothing is ever selected."""
        self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Remove the key."""
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Raise: the loop takes its turns without a selector."""
        raise AssertionError("the loop takes its turns without a selector")

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return the keys."""
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. `thread_s`: how long work takes that is passed to a thread."""

    def __init__(self, thread_s: Callable[[], float] = lambda: 0.0) -> None:
        self._jump = _Jump()
        self._thread_s = thread_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return the virtual time, seconds."""
        return self._jump.now_s

    # Half of a simulation is timers: a heap of tuples, and a turn without a selector, take half as long as asyncio's.

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback; those due at one moment run in the order in which they were scheduled. See asyncio."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def _run_once(self) -> None:
        """Run what is ready; where nothing is, jump to the next timer and run all that are due then."""
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]  # asyncio's own queue
        timers = self._timers
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Deadlock("nothing is ready and no timer runs")
            self._jump.now_s = max(self._jump.now_s, timers[0][0])
        while timers and timers[0][0] <= self._jump.now_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run `func` on the loop itself, `thread_s()` virtual seconds from now; `executor` is not used."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            """Run the function and set its result."""
            if not future.cancelled():
                future.set_result(func(*args))

        self.call_later(self._thread_s(), work)
        return future


class HostClock(Clock):
    """The clocks of one machine. `step_us`: how far its wall clock is from the true time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.step_us = 0

    def monotonic_us(self) -> int:
        """Return the microseconds of true time since the epoch; steps of the wall clock do not move it."""
        return EPOCH_US + round(self._loop.time() * 1e6)

    def wall_us(self) -> int:
        """Return the microseconds since the epoch as the machine believes them."""
        return EPOCH_US + round(self._loop.time() * 1e6) + self.step_us
