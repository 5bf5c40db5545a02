"""Watches this node's workers for late iterations, through their phase marks (protocol/marks.py), without their help.

Rules
-----
* A worker writes in its mark when its iteration began and how long it may last (trainer/detection/baseline.py). The
  watch looks when that time is over: once in several iterations. It looks every IDLE_S besides, because a limit becomes
  shorter as soon as the usual time is known, and between groups there is none; a look costs some 20 microseconds.
* Lateness is reported once, and again when it has lasted two, four, eight ... limits: a worker that is only slow moves
  on in between.
* A worker that has not moved in a section of its program for longer than that section's limit (hook.section) is late as
  well, whatever the iteration's limit; not while it waits in a collective. That is counted apart, anew after each move.
* A process that the kernel shows as stopped for STOPPED_S is late, whatever its limit, which may be long: while
  state is saved, or as long as nothing is known of its iterations.
* Time that a worker waits for a CPU does not count as time of its iteration: on a machine that is too busy, as when a
  fork server imports torch beside it, a worker without a CPU does not move either, and does not hang.
* A look that comes late itself proves nothing: this process, or the machine, was halted as well. It is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unicrond.agents.protocol import marks
from unicrond.agents.protocol.marks import Mark
from unicrond.events.vocabulary import WorkerId

IDLE_S = 0.5
#: A brief stop, as by a profiler that looks at the stack, does not last so long.
STOPPED_S = 1.0
#: A look that comes this much later than planned does not count.
_HELD_UP_US = 250_000
_MIN_US = 1_000


@dataclass(slots=True)
class _WatchedWorker:
    """What the watch knows of one worker."""

    pid: int
    timer: asyncio.TimerHandle | None = None
    looked_for_us: int = 0
    #: The iteration that was reported as late, and how often.
    late: tuple[int, int] = (0, 0)
    times: int = 0
    #: The same of its section: when its mark changed last.
    still_since_us: int = 0
    section_times: int = 0
    #: Since when every look has found it stopped; 0: it is not.
    stopped_us: int = 0
    #: For how long it has waited for a CPU: until the last look, and until the last one before this iteration.
    waited_us: int = 0
    waited_before_us: int = 0


class Signs(Protocol):
    """Reads a worker's phase mark and process state from outside; `now_us` is the clock of the marks."""

    def now_us(self) -> int:
        """Return the time in microseconds on the clock of the marks."""
        ...

    def mark(self, worker: WorkerId) -> Mark | None:
        """Return the worker's phase mark, None where it has made none."""
        ...

    def take_away(self, worker: WorkerId) -> Mark | None:
        """Remove the worker's mark, and return its last content."""
        ...

    def is_stopped(self, pid: int) -> bool:
        """Return whether the process is stopped (SIGSTOP, a debugger)."""
        ...

    def waited_us(self, pid: int) -> int:
        """Return for how long the process has waited for a CPU, in microseconds."""
        ...


class MarkFiles:
    """Reads marks from a directory, and process states from /proc."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def now_us(self) -> int:
        """Return the time; see Signs."""
        return marks.now_us()

    def mark(self, worker: WorkerId) -> Mark | None:
        """Return the mark; see Signs."""
        return marks.read(self._directory / worker)

    def take_away(self, worker: WorkerId) -> Mark | None:
        """Remove the mark; see Signs."""
        mark = self.mark(worker)
        with contextlib.suppress(OSError):
            (self._directory / worker).unlink()
        return mark

    def is_stopped(self, pid: int) -> bool:
        """Return whether the kernel shows the process as stopped by a signal or a debugger."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def waited_us(self, pid: int) -> int:
        """Return for how long its main thread, in which it trains, was ready to run and had no CPU.

        See Linux' Documentation/scheduler/sched-stats; 0 where the kernel does not say.
        """
        try:
            return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) // 1000
        except (OSError, ValueError, IndexError):
            return 0


class ProgressWatch:
    """Reports late workers: `on_late(worker, mark, still_us, stopped, times)` is called in the loop; `times` counts
    within an iteration, and within a section without a move."""

    def __init__(self, signs: Signs, on_late: Callable[[WorkerId, Mark, int, bool, int], None]) -> None:
        self._signs = signs
        self._on_late = on_late
        self._watched: dict[WorkerId, _WatchedWorker] = {}

    def follow(self, worker: WorkerId, pid: int) -> None:
        """Watch a worker; repeating this is harmless."""
        if worker not in self._watched:
            self._watched[worker] = _WatchedWorker(pid, waited_us=self._signs.waited_us(pid))
            self._look_in(worker, int(IDLE_S * 1e6))

    def drop(self, worker: WorkerId) -> Mark | None:
        """Stop watching a worker that has ended; remove its mark and return the last content."""
        watched = self._watched.pop(worker, None)
        if watched is not None and watched.timer is not None:
            watched.timer.cancel()
        return self._signs.take_away(worker)

    def close(self) -> None:
        """Stop watching; the marks stay, for the next agent."""
        for watched in self._watched.values():
            if watched.timer is not None:
                watched.timer.cancel()
        self._watched.clear()

    def _look_in(self, worker: WorkerId, after_us: int) -> None:
        watched = self._watched[worker]
        after_us = max(after_us, _MIN_US)
        watched.looked_for_us = self._signs.now_us() + after_us
        watched.timer = asyncio.get_running_loop().call_later(after_us / 1e6, self._look, worker)

    def _look(self, worker: WorkerId) -> None:
        watched, now_us = self._watched[worker], self._signs.now_us()
        mark = self._signs.mark(worker)
        waited_until_last_us = watched.waited_us
        watched.waited_us = max(waited_until_last_us, self._signs.waited_us(watched.pid))  # it may have ended
        if mark is None or not mark.limit_us:
            self._look_in(worker, int(IDLE_S * 1e6))
            return
        position = (mark.generation, mark.iteration)
        if position != watched.late:
            watched.late, watched.times, watched.waited_before_us = position, 0, waited_until_last_us
        starved_us = watched.waited_us - watched.waited_before_us
        is_stopped = self._signs.is_stopped(watched.pid)
        watched.stopped_us = (watched.stopped_us or now_us) if is_stopped else 0
        due_us = mark.boundary_us + mark.limit_us * 2**watched.times + starved_us
        if is_stopped and not watched.times:
            due_us = min(due_us, watched.stopped_us + int(STOPPED_S * 1e6))
        section_due_us = _section_due_us(watched, mark, starved_us)
        due_us = min(due_us, section_due_us or due_us)
        if now_us < due_us:
            self._look_in(worker, min(due_us - now_us, int(IDLE_S * 1e6)))
        elif now_us - watched.looked_for_us > _HELD_UP_US:
            self._look_in(worker, int(IDLE_S * 1e6))
        else:
            if due_us == section_due_us:
                watched.section_times += 1
            else:
                watched.times += 1
            times = watched.times + watched.section_times
            self._on_late(worker, mark, max(0, now_us - mark.changed_us - starved_us), is_stopped, times)
            if worker in self._watched:
                self._look_in(worker, int(IDLE_S * 1e6))


def _section_due_us(watched: _WatchedWorker, mark: Mark, starved_us: int) -> int:
    """Return when the worker has not moved in its section for too long; 0: never."""
    if watched.still_since_us != mark.changed_us:
        watched.still_since_us, watched.section_times = mark.changed_us, 0
    if not mark.section_limit_us or mark.is_waiting:
        return 0
    return mark.changed_us + (mark.section_limit_us << watched.section_times) + starved_us
