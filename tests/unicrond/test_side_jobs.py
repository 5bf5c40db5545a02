"""Work beside the head: one that fails is begun again, later each time, and says so as long as it matters."""

from __future__ import annotations

import asyncio
import errno
import os

from unicrond.service.head.side_jobs import WAIT_MAX_S, SideJobs


class FakeTime:
    """A clock that moves while somebody sleeps; ends the job after so many sleeps."""

    def __init__(self, sleeps: int) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []
        self._sleeps = sleeps
        self.is_over = asyncio.Event()

    def read(self) -> float:
        return self.now_s

    async def sleep(self, length_s: float) -> None:
        if len(self.slept_s) == self._sleeps:
            self.is_over.set()
            await asyncio.Event().wait()
        self.slept_s.append(length_s)
        self.now_s += length_s


async def settle(clock: FakeTime, task: asyncio.Task[None]) -> None:
    await clock.is_over.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_failing_job_is_begun_again_later_each_time() -> None:
    clock = FakeTime(9)
    jobs = SideJobs(clock.read, clock.sleep)

    async def archive() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    await settle(clock, jobs.start("log-life", archive))
    assert clock.slept_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    (line,) = jobs.alarms()
    assert line.key == "job-failed:log-life"
    assert line.startswith("log-life has failed ") and line.endswith("OSError: [Errno 24] Too many open files")
    clock.now_s += 2 * WAIT_MAX_S
    assert jobs.alarms() == []


async def test_job_that_has_run_long_begins_its_waits_anew() -> None:
    clock = FakeTime(3)
    jobs = SideJobs(clock.read, clock.sleep)

    async def returns() -> None:
        clock.now_s += WAIT_MAX_S

    await settle(clock, jobs.start("notifier", returns))
    assert clock.slept_s == [1, 1, 1]
    assert "notifier has failed (1 in a row)" in jobs.alarms()[0] and "ended without a reason" in jobs.alarms()[0]


async def test_job_that_fails_while_it_is_cancelled_ends() -> None:
    clock, runs = FakeTime(0), asyncio.Event()
    jobs = SideJobs(clock.read, clock.sleep)

    async def fail_at_end() -> None:
        runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("the disk is full")

    async def archive() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail_at_end())

    task = jobs.start("log-life", archive)
    await runs.wait()
    task.cancel()
    await asyncio.wait([task], timeout=30)
    assert task.cancelled()
