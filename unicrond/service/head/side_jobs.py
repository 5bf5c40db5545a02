"""Work beside the head: archive, notices, certificates, logins. A job that fails is begun again, and ends no head.

Rules
-----
* A job that raises or returns is begun again after 1, 2, 4, ... at most `WAIT_MAX_S` seconds; one that has run for as
  long as that begins anew with 1.
* Meanwhile, and until it has run for `WAIT_MAX_S`, it is a line for people that names it and its error.

What does not live here: work whose end is the head's end on purpose (the coordinator, the log's identity).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias

from unicrond.core.state.alarms import Alarm

log = logging.getLogger("unicrond")

#: Runs until it is cancelled.
Job: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
WAIT_MAX_S = 60.0


class JobFailure(NamedTuple):
    """The last failure of a job, and when."""

    error: str
    at_s: float
    in_a_row: int


class SideJobs:
    """Runs jobs by name. `now_s`, `sleep`: the clock's."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._now_s, self._sleep = now_s, sleep
        self.failures: dict[str, JobFailure] = {}

    def start(self, name: str, job: Job) -> asyncio.Task[None]:
        """Start a job, and return the task that keeps it until it is cancelled."""
        return asyncio.create_task(self._keep(name, job), name=name)

    def alarms(self) -> list[Alarm]:
        """Return what fails at this moment."""
        return [
            Alarm(
                "job-failed",
                f"{name} has failed ({failure.in_a_row} in a row), and is begun again: {failure.error}",
                name,
            )
            for name, failure in sorted(self.failures.items())
            if self._now_s() - failure.at_s < 2 * WAIT_MAX_S
        ]

    async def _keep(self, name: str, job: Job) -> None:
        wait_s, count = 1.0, 0
        while True:
            began_s = self._now_s()
            # A task of its own: a task group that fails counts as a cancellation of the task that it is in.
            task = asyncio.create_task(job(), name=name)
            try:
                await asyncio.wait([task])
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            problem = None if task.cancelled() else task.exception()
            error = "it ended without a reason"
            if problem is not None:
                cause = _cause(problem)
                error = " ".join(f"{type(cause).__name__}: {cause}".split())
                log.warning("%s failed: %s; it is begun again", name, error, exc_info=problem)
            if self._now_s() - began_s >= WAIT_MAX_S:
                wait_s, count = 1.0, 0
            count += 1
            self.failures[name] = JobFailure(error[:1024], self._now_s(), count)
            await self._sleep(wait_s)
            wait_s = min(WAIT_MAX_S, 2 * wait_s)


def _cause(error: BaseException) -> BaseException:
    """Return the first error of a task group, which says what has happened."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
