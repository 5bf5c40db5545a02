"""The log's life: a timer copies it to the archive and removes from NATS what is old, while the coordinator leads.

Rules
-----
* A process of its own archives and trims, with low priority: a long copy costs the coordinator nothing.
* The heartbeats that prove a node's loss go into the archive before their stream forgets them, so the interval is
  shorter than that.
* A trim removes nothing that the archive lacks, and never the term that fences appends (`events/archive/archive.py`).
  Where that one is too old, the coordinator begins another term, and the next round removes what is older.
* What fails is an alarm and is tried again at the next round; nothing else depends on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
from prometheus_client.core import Metric

from unicrond.core.state.alarms import Alarm
from unicrond.intake.config import Config
from unicrond.service.event_log import statistics as log_figures
from unicrond.service.event_log.archive_command import ArchiveOutcome, ArchiveRequest
from unicrond.service.event_log.statistics import AppendTimes, Figures, LogVolume, slack_s, stream_of

log = logging.getLogger("unicrond")

LOOK_EVERY_S = 10.0
#: After a head has begun to lead: soon, as beats may be about to expire, and not at once.
FIRST_AFTER_S = 60.0
_CHILD = "from unicrond.service.event_log.archive_command import main; main()"


class Leader(Protocol):
    """The coordinator of this process."""

    live: asyncio.Event

    def renew_term(self) -> None:
        """Begin another term at the next quiet moment."""
        ...


async def archive_apart(request: ArchiveRequest) -> ArchiveOutcome:
    """Archive and trim in a process of its own, and return the outcome. Ends the process when cancelled."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-c", _CHILD, "unicrond archive"),  # the name is for people who look at processes
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # the same code as ours, wherever we are
        start_new_session=True,
    )
    try:
        output, errors = await process.communicate(msgspec.json.encode(request))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    try:
        return msgspec.json.decode(output, type=ArchiveOutcome)
    except msgspec.MsgspecError:
        lines = errors.decode(errors="replace").split("\n")
        return ArchiveOutcome(
            error=next((line for line in reversed(lines) if line.strip()), f"exit {process.returncode}")
        )


class LogLife:
    """Archives and measures the log. `info`: the newest STREAM.INFO of the event stream, None before the first. `work`:
    what archives."""

    def __init__(
        self,
        config: Config,
        leader: Leader,
        info: Callable[[], dict[str, Any] | None],
        appends: AppendTimes,
        now_s: Callable[[], float],
        work: Callable[[ArchiveRequest], Awaitable[ArchiveOutcome]] = archive_apart,
    ) -> None:
        self.figures = Figures()
        self._config = config
        self._leader = leader
        self._info = info
        self._appends = appends
        self._now_s = now_s
        self._work = work
        self._archived_at_s = now_s()
        self._alarms: list[Alarm] = []

    async def run(self) -> None:
        """Watch and archive until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            if self._config.log.archive_every_s:
                group.create_task(self._keep_archiving())

    def alarms(self) -> list[Alarm]:
        """Return what a person has to look at now."""
        return log_figures.alarms(self._present(), self._config.log, self._config.keep_s)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        yield from log_figures.metrics(self._present())
        yield from self._appends.metrics()

    def _present(self) -> Figures:
        """Return the figures as they are now; those of the disks and the archive as of the last look."""
        figures, info = self.figures, self._info()
        figures.stream = stream_of(info) if info is not None else None
        figures.append_s = self._appends.usual_s()
        figures.archived_s = self._now_s() - self._archived_at_s if self._leader.live.is_set() else 0.0
        return figures

    async def _watch(self) -> None:
        while True:
            self.figures.disks = await asyncio.to_thread(self._disks)  # a volume may hang
            before, self._alarms = self._alarms, self.alarms()
            for line in self._alarms:
                if _words(line) not in map(_words, before):
                    log.error("ALARM: %s", line)
            await asyncio.sleep(LOOK_EVERY_S)

    def _disks(self) -> list[LogVolume]:
        places = [("archive", self._config.archive)]
        if not self._config.nats.url:
            places.insert(0, ("state", Path(self._config.state_dir)))
        return [disk for name, path in places if (disk := _disk(name, path)) is not None]

    async def _keep_archiving(self) -> None:
        every_s = self._config.log.archive_every_s
        while True:
            await self._leader.live.wait()
            self._archived_at_s = self._now_s()
            await asyncio.sleep(min(FIRST_AFTER_S, every_s))
            while self._leader.live.is_set():
                await self.archive_once()
                await asyncio.sleep(every_s)

    async def archive_once(self) -> None:
        """Archive once, and trim where something is old enough."""
        figures, info = self.figures, self._info()
        keep_s = self._config.keep_s
        is_old = keep_s is not None and info is not None and stream_of(info).oldest_s > keep_s + slack_s(keep_s)
        outcome = await self._work(ArchiveRequest(self._config, keep_s if is_old else None))
        figures.failures += bool(outcome.error or outcome.trim_error)
        if outcome.error != figures.failure and outcome.error:
            log.warning("the log was not archived: %s", outcome.error)
        figures.failure = outcome.error
        if outcome.error:
            return
        self._archived_at_s, figures.archived_s = self._now_s(), 0.0
        figures.archived_seq = outcome.last_seq
        figures.archived_beats += outcome.beats
        figures.removed += outcome.removed
        figures.trim_failure = "" if outcome.term_too_old else outcome.trim_error
        if outcome.removed:
            log.info("%d entries are in %s now and not in NATS", outcome.removed, self._config.archive)
        if outcome.term_too_old:
            log.info("beginning another term, so that older entries can be removed from NATS")
            self._leader.renew_term()


def _words(line: str) -> str:
    """Return the line without its numbers, which change while the alarm stands."""
    return re.sub(r"[0-9.]+", "", line)


def _disk(name: str, path: Path) -> LogVolume | None:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return LogVolume(name, str(path), usage.free, usage.total)
