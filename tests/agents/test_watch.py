"""The watch over phase marks: it looks when an iteration could be late, and tells only of those that are."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unicrond.agents.protocol import marks
from unicrond.agents.protocol.marks import Mark, Marker
from unicrond.agents.shell import progress_watch as watch
from unicrond.agents.shell.progress_watch import MarkFiles, ProgressWatch
from unicrond.events.vocabulary import WorkerId

WORKER = "big.1"
LIMIT_US = 60_000


class Open(ProgressWatch):
    """A Watch that shows when it has looked."""

    def __init__(self, files: MarkFiles, on_late: Callable[[WorkerId, Mark, int, bool, int], None]) -> None:
        super().__init__(files, on_late)
        self.looks: asyncio.Queue[WorkerId] = asyncio.Queue()
        #: What happens right after each of the next looks.
        self.then: list[Callable[[], None]] = []

    def _look(self, worker: WorkerId) -> None:
        super()._look(worker)
        if self.then:
            self.then.pop(0)()
        self.looks.put_nowait(worker)


class Told:
    """What the watch has told, and when it tells next."""

    def __init__(self, directory: Path) -> None:
        self.queue: asyncio.Queue[tuple[Mark, int, bool]] = asyncio.Queue()
        self.watch = Open(
            MarkFiles(directory),
            lambda _, mark, still_us, stopped, times: self.queue.put_nowait((mark, still_us, stopped)),
        )

    async def looked(self, times: int, within_s: float = 5.0) -> None:
        """So many looks from now on have been taken."""
        while not self.watch.looks.empty():
            self.watch.looks.get_nowait()
        async with asyncio.timeout(within_s):
            for _ in range(times):
                await self.watch.looks.get()

    async def next(self, within_s: float = 5.0) -> tuple[Mark, int, bool]:
        async with asyncio.timeout(within_s):
            return await self.queue.get()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "IDLE_S", 0.02)
    monkeypatch.setattr(watch, "STOPPED_S", 0.1)


@contextmanager
def stopped_process() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    yield process.pid
    process.kill()
    process.wait()


def marker(directory: Path) -> Marker:
    made = Marker(directory / WORKER)
    made.enter_group(3)
    made.phase = "forward"
    return made


async def test_late_iteration_is_reported_at_limit_and_twice_limit(tmp_path: Path) -> None:
    told, mark = Told(tmp_path), marker(tmp_path)
    told.watch.follow(WORKER, os.getpid())
    mark.begin_iteration(7, LIMIT_US)
    mark.begin_micro_batch(2)
    began_us = marks.now_us()
    first, still_us, stopped = await told.next()
    assert 0 <= marks.now_us() - began_us - LIMIT_US < 200_000
    assert (first.iteration, first.generation, first.phase, first.micro_batch) == (7, 3, "forward", 2)
    assert still_us >= LIMIT_US - 10_000 and not stopped
    _, again_us, _ = await told.next()
    assert again_us >= 2 * LIMIT_US - 10_000
    told.watch.close()


async def test_watch_notices_shorter_limit(tmp_path: Path) -> None:
    told, mark = Told(tmp_path), marker(tmp_path)
    mark.begin_iteration(1, 600_000_000)
    told.watch.follow(WORKER, os.getpid())
    await told.looked(2)
    mark.begin_iteration(2, LIMIT_US)
    assert (await told.next())[0].iteration == 2
    told.watch.close()


async def test_timely_steps_are_never_reported(tmp_path: Path) -> None:
    told, mark = Told(tmp_path), marker(tmp_path)
    told.watch.follow(WORKER, os.getpid())
    for iteration in range(1, 11):
        mark.begin_iteration(iteration, 2_000_000)
        await told.looked(1)
    mark.begin_iteration(11, 0)  # without a limit
    await told.looked(3)
    assert told.queue.empty()
    told.watch.close()


async def test_watch_detects_stopped_process(tmp_path: Path) -> None:
    told, mark = Told(tmp_path), marker(tmp_path)
    with stopped_process() as pid:
        mark.begin_iteration(1, LIMIT_US)
        told.watch.follow(WORKER, pid)
        assert (await told.next())[2]
    told.watch.close()


async def test_stopped_process_is_reported_before_its_limit(tmp_path: Path) -> None:
    """Its limit is long, as while state is saved for the first time: it does not move all the same."""
    told, mark = Told(tmp_path), marker(tmp_path)
    with stopped_process() as pid:
        mark.begin_iteration(1, 600_000_000)
        told.watch.follow(WORKER, pid)
        assert (await told.next())[2]
    told.watch.close()


async def test_cpu_starvation_is_no_hang(tmp_path: Path) -> None:
    """A third of a second in which it waited for a CPU is none of its iteration's 60 ms, nor of its standing still."""
    told, mark = Told(tmp_path), marker(tmp_path)
    began_us, starved_us = marks.now_us(), 333_000
    told.watch._signs.waited_us = lambda _: min(marks.now_us() - began_us, starved_us)  # type: ignore[method-assign]
    told.watch.follow(WORKER, os.getpid())
    mark.begin_iteration(7, LIMIT_US)
    _, still_us, _ = await told.next()
    told_us = marks.now_us() - began_us
    assert told_us >= LIMIT_US + starved_us - 10_000
    assert still_us <= told_us - starved_us + 20_000
    told.watch.close()


async def test_finished_process_has_no_extra_waiting_time(tmp_path: Path) -> None:
    """Nothing is known of its waiting any more: that is no hundred seconds in which it did not move."""
    told, mark = Told(tmp_path), marker(tmp_path)
    waited = iter([100_000_000, 100_000_000])
    told.watch._signs.waited_us = lambda _: next(waited, 0)  # type: ignore[method-assign]
    told.watch.follow(WORKER, os.getpid())
    mark.begin_iteration(7, LIMIT_US)
    _, still_us, _ = await told.next()
    assert LIMIT_US <= still_us < 50_000_000
    told.watch.close()


def test_kernel_tells_cpu_wait_of_process(tmp_path: Path) -> None:
    """Two processes that want one CPU."""
    mine = os.sched_getaffinity(0)
    program = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    rival = subprocess.Popen([sys.executable, "-c", program, str(min(mine))])
    try:
        os.sched_setaffinity(0, {min(mine)})
        until_s = time.monotonic() + 60
        while MarkFiles(tmp_path).waited_us(rival.pid) < 50_000:
            assert time.monotonic() < until_s
    finally:
        os.sched_setaffinity(0, mine)
        rival.kill()
        rival.wait()
    assert MarkFiles(tmp_path).waited_us(rival.pid) == 0, "there is no such process any more"


async def test_watch_distrusts_own_late_look(tmp_path: Path) -> None:
    told, mark = Told(tmp_path), marker(tmp_path)
    mark.begin_iteration(1, 30 * LIMIT_US)
    # The agent is held up, and so might the worker be; the look that was due meanwhile sees an iteration that is late.
    told.watch.then = [lambda: time.sleep(2.5), lambda: mark.begin_iteration(2, 10_000_000)]
    told.watch.follow(WORKER, os.getpid())
    await told.looked(4)
    assert told.queue.empty() and not told.watch.then
    told.watch.close()


async def test_watch_returns_last_mark_once(tmp_path: Path) -> None:
    told, mark = Told(tmp_path), marker(tmp_path)
    told.watch.follow(WORKER, os.getpid())
    other = Marker(tmp_path / "big.2")
    other.enter_group(3)
    told.watch.follow("big.2", os.getpid())
    mark.begin_iteration(9, LIMIT_US)
    other.begin_iteration(10, LIMIT_US)
    last = told.watch.drop(WORKER)
    assert last is not None and last.iteration == 9
    assert told.watch.drop(WORKER) is None
    assert [(await told.next())[0].iteration for _ in range(2)] == [10, 10], "only the other one is late"
    told.watch.close()


def slow_in(mark: Marker, limit_us: int = LIMIT_US) -> None:
    mark.begin_iteration(7, 600_000_000)
    mark.enter_section(b"data", marks.now_us(), limit_us, marks.now_us())


async def test_hang_in_a_section_is_reported_by_its_own_limit(tmp_path: Path) -> None:
    """The iteration may last ten minutes."""
    told, mark = Told(tmp_path), marker(tmp_path)
    told.watch.follow(WORKER, os.getpid())
    slow_in(mark)
    first, still_us, _ = await told.next()
    assert (first.section, first.section_limit_us) == ("data", LIMIT_US) and still_us >= LIMIT_US
    _, again_us, _ = await told.next()
    assert again_us >= 2 * LIMIT_US
    mark.phase = "backward"  # it moves: its time begins anew
    moved_us = marks.now_us()
    _, still_us, _ = await told.next()
    assert LIMIT_US <= still_us <= marks.now_us() - moved_us + 1_000
    told.watch.close()


async def test_worker_that_waits_in_a_collective_is_late_in_no_section(tmp_path: Path) -> None:
    told, mark = Told(tmp_path), marker(tmp_path)
    told.watch.follow(WORKER, os.getpid())
    slow_in(mark)
    mark.entering()
    await told.looked(8)
    assert told.queue.empty()
    mark.leaving()
    assert (await told.next())[0].section == "data"
    told.watch.close()


async def test_slow_section_makes_the_iteration_no_later(tmp_path: Path) -> None:
    """What was told of the section does not count as lateness of the iteration, whose own limit comes after it."""
    told, mark = Told(tmp_path), marker(tmp_path)
    told.watch.follow(WORKER, os.getpid())
    slow_in(mark)
    await told.next()
    watched = told.watch._watched[WORKER]
    assert (watched.times, watched.section_times > 0) == (0, True)
    told.watch.close()
