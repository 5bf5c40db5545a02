"""Archive and retention: the older part of the stream goes to files, and only then from the server.

The event stream denies deletion and purge, and that cannot be taken back; nothing of it goes by accident. What an
operator may still set is an age limit. So a trim is: copy everything into the archive, make it durable, read it
back; then set the limit for a moment, wait until what is older has gone, and take it away again. Agents, their
consumers and the coordinator notice nothing.

Rules
-----
* What goes stands in the archive, and is read back first; what is younger than KEEP_LEAST_S stays, so that between the
  copy and the limit nothing can go that was not copied.
* The newest CoordinatorStarted stays: it is the token that fences appends. If it is too old, a coordinator must
  start first.
* A limit that a crash left behind is marked in the stream's metadata, and taken away by the next start of a
  coordinator or of an archive.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from unicrond.events.archive.archived_log import archived_batches, newest_archived, require_same
from unicrond.events.archive.follower import ArchiveFollower, ArchiveResult
from unicrond.events.log.event_log import EventLog, LogDamaged, LogError
from unicrond.events.log.segment_writer import LogBusy, SegmentWriter
from unicrond.events.log.segments import SegmentBatch, read_segment, segment_paths
from unicrond.events.log.subjects import EVENT_STREAM, TERM_SUBJECT
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.streams import NANOS, NO_MESSAGE_FOUND, TRIMMING, JetStreamError, api, end_trim
from unicrond.events.wire.envelope import Entry, RecordedEvent

KEEP_LEAST_S = 3600.0
_WAIT_S = 30.0
_AGAIN_S = 0.5


class CannotTrim(LogError):
    """Nothing was removed; the message says why and what to do."""


class TermTooOld(CannotTrim):
    """The newest term began before what is to stay: a coordinator must begin another one first."""


async def archive(connection: Connection, directory: Path) -> ArchiveResult:
    """Copy what is new in the event stream into `directory`, and read it back. Where another process follows the stream
    with this archive, wait until it has done so. Raises LogError, OSError."""
    last = await NatsEventLog(connection).last_seq()
    results = [ArchiveResult(0, 0)]
    try:
        await ArchiveFollower(connection, directory, on_result=results.append).follow(last)
    except LogBusy:
        await _wait_for_writer(directory, last)
        return ArchiveResult(last, 0)
    count = sum(result.copied for result in results)
    await asyncio.to_thread(_read_back, directory, last - count, last)
    return ArchiveResult(last, count, sum(result.beats for result in results))


async def trim(connection: Connection, directory: Path, keep_s: float, *, keep_least_s: float = KEEP_LEAST_S) -> int:
    """Remove the entries that are older than `keep_s` and stand in the archive; return how many were removed. Raises
    CannotTrim, LogError."""
    if keep_s < keep_least_s:
        raise CannotTrim(f"keep: {keep_s:g} s is too short; keep {keep_least_s:g} s or more")
    info = await clear_age_limit(connection)
    before = int(info["state"]["first_seq"])
    newest = newest_archived(directory)
    if newest is None or newest.seq < before:
        raise CannotTrim(f"{directory}: holds nothing of the stream; archive first")
    limit_s = _server_now_s(info) - keep_s
    cut = await _newest_older_than(connection, info, limit_s)
    if cut > newest.seq:
        raise CannotTrim(f"{directory}: ends with entry {newest.seq}, which is newer than entry {cut}; archive first")
    if cut < before:
        return 0
    term_seq = await _term_seq(connection)
    if term_seq <= cut:
        raise TermTooOld(
            f"the coordinator's term began with entry {term_seq}, and must stay; restart the coordinator, or keep more"
        )
    await asyncio.to_thread(_read_back, directory, before - 1, cut)
    info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    # What has grown old while it was read back, the term's claim perhaps, was not looked at, and stays.
    await _set_limit(connection, info, int((_server_now_s(info) - limit_s) * NANOS))
    try:
        async with asyncio.timeout(_WAIT_S):
            while int(info["state"]["first_seq"]) <= cut:
                await asyncio.sleep(0.05)  # the server offers no event for it
                info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    except TimeoutError:
        raise CannotTrim(f"the server did not remove the older entries within {_WAIT_S:g} s") from None
    finally:
        info = await clear_age_limit(connection)
    return int(info["state"]["first_seq"]) - before


async def adopt(log: EventLog, directory: Path, name: str) -> Path | None:
    """Make the archive one of this log: what the log does not have goes into the directory `name` below
    it. Return that; None where nothing had to go. Raises LogError, OSError."""
    newest = await asyncio.to_thread(newest_archived, directory)
    if newest is None:
        return None
    seq = min(newest.seq, await log.last_seq())
    try:
        for entry in await asyncio.to_thread(_archived, directory, seq):
            await require_same(log, entry, directory)
            if entry.seq == newest.seq:
                return None
    except LogDamaged:
        seq = 0
    aside = directory / name
    await asyncio.to_thread(_set_aside, directory, seq, aside)
    return aside


def _archived(directory: Path, seq: int) -> list[Entry]:
    """Return entry `seq` of the archive; none for 0."""
    batches = archived_batches(directory, seq - 1) if seq else iter([])
    return [entry for batch in batches for entry in batch if entry.seq == seq]


def _set_aside(directory: Path, seq: int, aside: Path) -> None:
    """Move the segments that hold entries after `seq` into `aside`, and write what they hold up to it again."""
    writer = SegmentWriter(directory)  # nobody else writes meanwhile
    try:
        segments = segment_paths(directory)
        ends = [*(int(segment.stem) - 1 for segment in segments[1:]), seq + 1]
        moves = [segment for segment, end in zip(segments, ends, strict=True) if end > seq or not seq]
        aside.mkdir(mode=0o700)
        start = aside / "start"
        copy = SegmentWriter(start)
        try:
            beats: list[RecordedEvent] = []
            for batch in _batches_until(moves[0], seq):
                beats += batch.beats
                if entries := [entry for entry in batch.entries if entry.seq <= seq]:
                    copy.write(entries, beats=beats)
                    beats = []
        finally:
            copy.close()
        for segment in moves:
            segment.rename(aside / segment.name)
        for segment in segment_paths(start):
            segment.rename(directory / segment.name)
        shutil.rmtree(start)
    finally:
        writer.close()


def _batches_until(segment: Path, seq: int) -> Iterator[SegmentBatch]:
    """Yield the batches that begin with `seq` or before."""
    for batch in read_segment(segment) if int(segment.stem) <= seq else ():
        if batch.entries and batch.entries[0].seq > seq:
            return
        yield batch


async def clear_age_limit(connection: Connection) -> dict[str, Any]:
    """End a trim, our own or one that a crash left behind; return the stream's information."""
    info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    if TRIMMING in (info["config"].get("metadata") or {}):
        await end_trim(connection, EVENT_STREAM, info["config"])
        info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    return info


def _server_now_s(info: dict[str, Any]) -> float:
    """Return the server's time when it gave this information, seconds since the epoch."""
    return datetime.fromisoformat(info["ts"]).timestamp()


async def _set_limit(connection: Connection, info: dict[str, Any], age_ns: int) -> None:
    """Set the age limit of the event stream, marked as one of a trim."""
    config = info["config"]
    metadata = {**(config.get("metadata") or {}), TRIMMING: "true"}
    await api(connection, f"STREAM.UPDATE.{EVENT_STREAM}", {**config, "max_age": age_ns, "metadata": metadata})


async def _newest_older_than(connection: Connection, info: dict[str, Any], limit_s: float) -> int:
    """Search by halving for the newest entry recorded before `limit_s` (server's clock); return first_seq - 1 for
    none."""
    low, high = int(info["state"]["first_seq"]) - 1, int(info["state"]["last_seq"])
    while low < high:
        middle = (low + high + 1) // 2
        reply = await api(connection, f"STREAM.MSG.GET.{EVENT_STREAM}", {"seq": middle})
        if datetime.fromisoformat(reply["message"]["time"]).timestamp() < limit_s:
            low = middle
        else:
            high = middle - 1
    return low


async def _term_seq(connection: Connection) -> int:
    """Return the sequence number under which the newest term was claimed, 0 for none."""
    try:
        reply = await api(connection, f"STREAM.MSG.GET.{EVENT_STREAM}", {"last_by_subj": TERM_SUBJECT})
    except JetStreamError as error:
        if error.code != NO_MESSAGE_FOUND:
            raise
        return 0
    return int(reply["message"]["seq"])


async def _wait_for_writer(directory: Path, last: int) -> None:
    """Return once the archive, to which another process writes, holds entry `last`. Raises LogBusy, LogDamaged."""
    for _ in range(int(_WAIT_S / _AGAIN_S)):
        newest = await asyncio.to_thread(newest_archived, directory)
        if last <= (newest.seq if newest is not None else 0):
            return
        await asyncio.sleep(_AGAIN_S)
    raise LogBusy(f"{directory}: another process writes to this archive, and has not come to entry {last} yet")


def _read_back(directory: Path, begin: int, last: int) -> None:
    """Read the entries after `begin` up to `last`; raise LogDamaged where the archive lacks one."""
    seq = begin
    for batch in archived_batches(directory, begin):
        for entry in batch:
            if entry.seq > last:
                return
            if entry.seq > begin:
                if entry.seq != seq + 1:
                    raise LogDamaged(f"{directory}: entry {seq + 1} is missing")
                seq = entry.seq
    if seq != last:
        raise LogDamaged(f"{directory}: ends with entry {seq} after entries up to {last} were written")
