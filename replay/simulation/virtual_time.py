"""An asyncio loop whose time jumps to the next thing that happens; no thread, no file, no clock of the machine.

Rules
-----
* `time()` is the only time there is. When nothing is ready it jumps to the earliest timer.
* The same calls in the same order give the same run: the ready queue is first in, first out, and the timers' heap is
  a function of what was pushed.
* Work for a thread (`asyncio.to_thread`) is done in the loop, after a virtual delay.
* Nothing ready and no timer is a deadlock of the simulation itself: it raises, it never hangs.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from unicrond.coordinator import Clock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
EPOCH_US = 1_700_000_000 * 1_000_000


class Deadlock(RuntimeError):
    """Nothing will ever happen again."""


class _Jump(selectors.BaseSelector):
    """A selector that waits by letting time pass."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("nothing is ready and no timer runs")
        self.now_s += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """`thread_s`: how long work takes that is given to a thread."""

    def __init__(self, thread_s: Callable[[], float] = lambda: 0.0) -> None:
        self._jump = _Jump()
        self._thread_s = thread_s
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
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
        return EPOCH_US + round(self._loop.time() * 1e6)

    def wall_us(self) -> int:
        return EPOCH_US + round(self._loop.time() * 1e6) + self.step_us
