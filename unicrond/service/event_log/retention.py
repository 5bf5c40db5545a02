"""The log's life: what it takes goes to the archive, and what is old from NATS, while the coordinator leads.

Rules
-----
* A process of its own follows the log and writes the archive, with low priority: neither a long copy nor a disk that
  hangs costs the coordinator anything. It ends with this process, however that ends, and has then written what it had
  read. One that fails is begun again.
* The archive is behind by the entries that this head has folded and the archive lacks. That is an alarm once the first
  of them has waited for BEHIND_LAGS times `log.archive_lag_s`; nothing else depends on it.
* A trim removes nothing that the archive lacks, and never the term that fences appends (`events/archive/archive.py`).
  Where that one is too old, the coordinator begins another term, and the next trim removes what is older.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
from prometheus_client.core import Metric

from unicrond.core.state.alarms import Alarm
from unicrond.events.log.event_log import LogError
from unicrond.intake.config import Config
from unicrond.service.event_log import statistics as log_figures
from unicrond.service.event_log.archive_command import MAX_LINE_BYTES, STOP_S, ArchiveOutcome, TrimOrder
from unicrond.service.event_log.statistics import AppendTimes, ArchiveLag, Figures, LogVolume, slack_s, stream_of

log = logging.getLogger("unicrond")

LOOK_EVERY_S = 10.0
#: How often the archive is compared with what was folded.
LAG_EVERY_S = 0.5
TRIM_EVERY_S = 60.0
#: After a following that has failed: so long, twice as long each time.
_AGAIN_S, _AGAIN_MAX_S = 1.0, 30.0
_CHILD = "from unicrond.service.event_log.archive_command import main; main()"


class Leader(Protocol):
    """The coordinator of this process."""

    live: asyncio.Event

    def renew_term(self) -> None:
        """Begin another term at the next quiet moment."""
        ...


#: Follows the log of a configuration and yields outcomes, until it is closed; takes orders to trim from the queue.
Following: TypeAlias = Callable[[Config, "asyncio.Queue[TrimOrder]"], AsyncGenerator[ArchiveOutcome, None]]


async def follow_apart(config: Config, trims: asyncio.Queue[TrimOrder]) -> AsyncGenerator[ArchiveOutcome, None]:
    """Have a process of its own archive the log, and yield its outcomes. Closed, it lets the process end. Raises
    OSError, LogError where it has ended by itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-c", _CHILD, "unicrond archive"),  # the name is for people who look at processes
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # the same code as ours, wherever we are
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None, "pipes"
    words: deque[str] = deque(maxlen=1)
    helpers = [
        asyncio.create_task(_last_line(process.stderr, words)),
        asyncio.create_task(_order(process.stdin, config, trims)),
    ]
    try:
        while line := await process.stdout.readline():
            yield msgspec.json.decode(line, type=ArchiveOutcome)
        code = await process.wait()
        await asyncio.wait(helpers[:1], timeout=1.0)
        raise LogError(f"the process that archives has ended with code {code}: {' '.join(words) or 'it says nothing'}")
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S + 1.0):
                while await process.stdout.readline():  # it may wait for us to read
                    pass
                await process.wait()
        except TimeoutError:
            log.warning("the process that archives (pid %d) does not end by itself; it is killed", process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)


async def _last_line(errors: asyncio.StreamReader, words: deque[str]) -> None:
    """Keep the last line that is not empty."""
    async for line in errors:
        if text := line.decode(errors="replace").strip():
            words.append(text)


async def _order(orders: asyncio.StreamWriter, config: Config, trims: asyncio.Queue[TrimOrder]) -> None:
    """Pass on what to do. A process that has ended is noticed by its output."""
    with contextlib.suppress(ConnectionError):
        orders.write(msgspec.json.encode(config) + b"\n")
        await orders.drain()
        while True:
            orders.write(msgspec.json.encode(await trims.get()) + b"\n")
            await orders.drain()


class LogLife:
    """Archives and measures the log. `info`: the newest STREAM.INFO of the event stream, None before the first.
    `folded_seq`: of this head. `following`: what archives."""

    def __init__(
        self,
        config: Config,
        leader: Leader,
        info: Callable[[], dict[str, Any] | None],
        folded_seq: Callable[[], int],
        appends: AppendTimes,
        now_s: Callable[[], float],
        following: Following = follow_apart,
    ) -> None:
        self.figures = Figures()
        self._config = config
        self._leader = leader
        self._info = info
        self._folded_seq = folded_seq
        self._appends = appends
        self._now_s = now_s
        self._following = following
        self._lag = ArchiveLag()
        self._trims: asyncio.Queue[TrimOrder] = asyncio.Queue()
        self._alarms: list[Alarm] = []

    async def run(self) -> None:
        """Watch and archive until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            if self._config.log.archive_lag_s:
                group.create_task(self._keep_archiving())

    def alarms(self) -> list[Alarm]:
        """Return what a person has to look at now."""
        return log_figures.alarms(self._present(), self._config.log, self._config.keep_s)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        yield from log_figures.metrics(self._present())
        yield from self._appends.metrics()

    def archive(self) -> dict[str, Any]:
        """Return where the archive is, for /healthz; {} where this head does not archive."""
        if not self._archives:
            return {}
        figures = self._present()
        return {
            "seq": figures.archived_seq,
            "behind_entries": figures.behind_entries,
            "behind_s": round(figures.behind_s, 3),
        }

    @property
    def _archives(self) -> bool:
        return bool(self._config.log.archive_lag_s) and self._leader.live.is_set()

    def _present(self) -> Figures:
        """Return the figures as they are now; those of the disks and the archive as of the last look."""
        figures, info = self.figures, self._info()
        figures.stream = stream_of(info) if info is not None else None
        figures.append_s = self._appends.usual_s()
        figures.behind_entries = max(0, self._folded_seq() - figures.archived_seq) if self._archives else 0
        figures.behind_s = self._lag.seconds(self._now_s()) if self._archives else 0.0
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
        again_s = _AGAIN_S
        while True:
            await self._leader.live.wait()
            self._lag, self._trims = ArchiveLag(), asyncio.Queue()
            before_seq = self.figures.archived_seq
            following = asyncio.create_task(self._follow())
            trimming = asyncio.create_task(self._keep_trimming())
            try:
                while self._leader.live.is_set() and not following.done():
                    self._lag.look(self._folded_seq(), self.figures.archived_seq, self._now_s())
                    await asyncio.wait([following], timeout=LAG_EVERY_S)
            finally:
                for task in (following, trimming):
                    task.cancel()
                await asyncio.gather(following, trimming, return_exceptions=True)
            if self._leader.live.is_set():
                again_s = _AGAIN_S if self.figures.archived_seq > before_seq else min(_AGAIN_MAX_S, 2 * again_s)
                await asyncio.sleep(again_s)

    async def _follow(self) -> None:
        """Take in what the process that archives tells, until it fails."""
        try:
            async with aclosing(self._following(self._config, self._trims)) as outcomes:
                async for outcome in outcomes:
                    self.take(outcome)
        except (LogError, OSError, msgspec.MsgspecError) as error:
            self.take(ArchiveOutcome(error=" ".join(str(error).split())))

    async def _keep_trimming(self) -> None:
        while True:
            await asyncio.sleep(TRIM_EVERY_S)
            if (order := self.trim_order()) is not None and self._trims.empty():
                self._trims.put_nowait(order)

    def trim_order(self) -> TrimOrder | None:
        """Return what to remove from NATS now; None where nothing is old enough."""
        keep_s, info = self._config.keep_s, self._info()
        if keep_s is None or info is None or stream_of(info).oldest_s <= keep_s + slack_s(keep_s):
            return None
        return TrimOrder(keep_s)

    def take(self, outcome: ArchiveOutcome) -> None:
        """Take in what was achieved, or has failed."""
        figures = self.figures
        figures.failures += bool(outcome.error or outcome.trim_error)
        if outcome.is_trim:
            self._take_trim(outcome)
            return
        if outcome.error != figures.failure and outcome.error:
            log.warning("the log was not archived: %s", outcome.error)
        figures.failure = outcome.error
        if outcome.error:
            return
        figures.archived_seq = outcome.last_seq
        figures.archived_beats += outcome.beats
        self._lag.look(self._folded_seq(), figures.archived_seq, self._now_s())

    def _take_trim(self, outcome: ArchiveOutcome) -> None:
        figures = self.figures
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
