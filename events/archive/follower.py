"""The archive follows the log: one process appends to the files what the event stream takes, seconds after it.

Rules
-----
* One writer for each archive: its lock is held while it is written, by the kernel until this process has ended.
* What has waited for `delay_s` is written, with all that came meanwhile, and is on the disk before it is told of.
* A log that is gone, ends earlier or is another one ends the following. What was read of it before goes into the
  archive first, and then the lock is free: a restore finds all that this process has seen.
* The heartbeats that prove a loss stand before the entry. Where NATS does not give them, entries do not wait for them:
  they come with a later batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from unicrond.events.archive.archived_log import newest_archived, require_same
from unicrond.events.log.event_log import LogError
from unicrond.events.log.heartbeat_evidence import NodeVerdict, NodeVerdicts, evidence, heartbeat_us_of, spans
from unicrond.events.log.segment_writer import SegmentWriter
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM
from unicrond.events.log.subjects import entry as message
from unicrond.events.nats.connection import Connection, NoReply
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.log_proof import LogProof
from unicrond.events.nats.reader import read_stream
from unicrond.events.nats.streams import JetStreamError, api, api_once
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.envelope import Entry, RecordedEvent

logger = logging.getLogger(__name__)

BATCH = 1000
#: Who begins to follow reads the newest segment through first.
SEGMENT_BYTES = 8 * 2**20
#: So many entries may wait in memory; then reading waits.
_ROOM = 10 * BATCH
#: How often the stream is asked whether it is still there, and how long it may not answer.
_LOOK_S = 1.0
_SILENCE_S = 5.0
_EVIDENCE_S = 3.0
_BACKLOG_MAX = 10_000


class ArchiveResult(NamedTuple):
    """The archive's contents: entries 1 to `last_seq`, of which `copied` are new since the last result. `beats`: the
    heartbeats that were kept with those."""

    last_seq: int
    copied: int
    beats: int = 0


class ArchiveFollower:
    """Follows the event stream for one archive. `on_result` is called with what has become durable."""

    def __init__(
        self,
        connection: Connection,
        directory: Path,
        delay_s: float = 0.0,
        on_result: Callable[[ArchiveResult], object] = lambda _: None,
    ) -> None:
        self._connection = connection
        self._directory = directory
        self._delay_s = delay_s
        self._on_result = on_result
        self._pending: list[Entry] = []
        #: The last entry that was read.
        self.read_seq = 0
        self._backlog: list[NodeVerdict] = []
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._stops = False
        self._heard_s = float("-inf")

    def stop(self) -> None:
        """Have `follow` return once what was read is written."""
        self._stops = True
        self._news.set()

    async def follow(self, until_seq: int | None = None) -> None:
        """Follow up to and including `until_seq`, None: until `stop`. Raises LogError where the log cannot be followed,
        LogBusy where another process does, OSError."""
        log = NatsEventLog(self._connection, proof=LogProof(reader="this archive"))
        if problem := await self._problem():  # before the lock is taken: who restores the log needs it
            raise LogError(problem)
        writer = SegmentWriter(self._directory, segment_bytes=SEGMENT_BYTES)
        reading: asyncio.Task[None] | None = None
        try:
            await _apart(writer.repair)
            newest = await _apart(newest_archived, self._directory)
            if newest is not None:
                await require_same(log, newest, self._directory)
            self.read_seq = newest.seq if newest is not None else 0
            self._on_result(ArchiveResult(self.read_seq, 0))
            verdicts = NodeVerdicts(await _heartbeat_us(log))
            reading = asyncio.create_task(self._read(log, until_seq))
            reading.add_done_callback(lambda _: self._news.set())
            await self._write_on(reading, writer, verdicts)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            writer.close()

    async def _read(self, log: NatsEventLog, until_seq: int | None) -> None:
        """Put what the log takes among what waits to be written."""
        async with aclosing(log.read_batches(self.read_seq, until_seq=until_seq)) as batches:
            async for batch in batches:
                self._pending += batch
                self.read_seq = batch[-1].seq
                self._news.set()
                while len(self._pending) >= _ROOM:
                    self._room.clear()
                    await self._room.wait()

    async def _write_on(self, reading: asyncio.Task[None], writer: SegmentWriter, verdicts: NodeVerdicts) -> None:
        """Write until the reading ends, or `stop`. Raises what ends the reading."""
        self._heard_s = looked_s = time.monotonic()
        due_s: float | None = None
        while True:
            next_s = looked_s + _LOOK_S if due_s is None else min(due_s, looked_s + _LOOK_S)
            await self._wait(next_s - time.monotonic())
            now_s, is_over, problem = time.monotonic(), self._stops or reading.done(), ""
            if now_s - looked_s >= _LOOK_S:
                problem = await self._problem()
                looked_s = time.monotonic()
            if self._pending and due_s is None:
                due_s = now_s + self._delay_s
            is_due = due_s is not None and (now_s >= due_s or len(self._pending) >= BATCH)
            if is_due or is_over or problem:
                await self._write(writer, verdicts)
                due_s = None
            if problem:
                raise LogError(problem)
            if is_over:
                if reading.done():
                    reading.result()
                return

    async def _wait(self, timeout_s: float) -> None:
        """Return when something has come, or after so long."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    async def _write(self, writer: SegmentWriter, verdicts: NodeVerdicts) -> None:
        """Write what waits. Raises LogUnavailable, LogDamaged."""
        count = beat_count = 0
        while self._pending:
            batch = self._pending[:BATCH]
            beats = await self._evidence(self._backlog + verdicts.among(batch))
            is_last = len(self._pending) == len(batch)
            await _apart(lambda: writer.write(batch, sync=is_last, beats=beats))  # noqa: B023  (awaited here)
            del self._pending[: len(batch)]
            self._room.set()
            count, beat_count = count + len(batch), beat_count + len(beats)
            if is_last:
                self._on_result(ArchiveResult(batch[-1].seq, count, beat_count))
                count = beat_count = 0

    async def _evidence(self, verdicts: list[NodeVerdict]) -> list[RecordedEvent]:
        """Return the heartbeats to keep for these verdicts, as far as the stream still has them. What NATS does not
        give now is asked for later."""
        beats: list[RecordedEvent] = []
        if not verdicts:
            return beats
        try:
            async with asyncio.timeout(_EVIDENCE_S):
                for from_us, to_us in spans(verdicts):
                    beats += [beat async for beat in _beats(self._connection, from_us, to_us)]
        except (TimeoutError, LogError) as error:
            logger.warning("no heartbeats for the archive yet: %s", error or f"no answer within {_EVIDENCE_S:g} s")
            self._backlog = verdicts[-_BACKLOG_MAX:]
            return []
        self._backlog = []
        return evidence(verdicts, beats)

    async def _problem(self) -> str:
        """Return why the log cannot be followed any more; "" where it can."""
        read_seq = self.read_seq  # more may be read before the answer comes
        try:
            info = await api_once(self._connection, f"STREAM.INFO.{EVENT_STREAM}", {}, _LOOK_S)
        except (NoReply, JetStreamError) as error:
            if isinstance(error, JetStreamError) and not error.is_transient:
                return f"NATS has no event log: {error}"
            silent_s = time.monotonic() - self._heard_s
            return f"NATS does not answer about the event log: {error}" if silent_s > _SILENCE_S else ""
        self._heard_s = time.monotonic()
        end = info["state"]["last_seq"]
        return f"the event log ends at entry {end}, and entry {read_seq} was read" if end < read_seq else ""


async def _apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run what may wait for a disk in a thread, to its end, also where this task is cancelled meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait([task])


async def _heartbeat_us(log: NatsEventLog) -> int:
    """Return the heartbeat interval of the newest term. An older term inside the part that is read states its own."""
    newest = await log.newest_term()
    started = newest.envelope.event if isinstance(newest, RecordedEvent) else None
    return heartbeat_us_of(started) if isinstance(started, CoordinatorStarted) else 1_000_000


async def _beats(connection: Connection, from_us: int, to_us: int) -> AsyncGenerator[RecordedEvent, None]:
    """Yield the heartbeats that the heartbeat stream holds of that time, both ends included."""
    state = (await api(connection, f"STREAM.INFO.{BEAT_STREAM}", {}))["state"]
    if not state["messages"] or datetime.fromisoformat(state["last_ts"]).timestamp() * 1e6 < from_us:
        return
    begin = datetime.fromtimestamp((from_us - 1000) / 1e6, UTC).isoformat()
    start = {"deliver_policy": "by_start_time", "opt_start_time": begin}
    async with aclosing(read_stream(connection, BEAT_STREAM, start=start)) as messages:
        async for stored in messages:
            if stored.recorded_at_us > to_us:
                return
            beat = message(stored.seq, stored.recorded_at_us, stored.subject, stored.body)
            if isinstance(beat, RecordedEvent) and stored.recorded_at_us >= from_us:
                yield beat
            if stored.seq >= state["last_seq"]:
                return
