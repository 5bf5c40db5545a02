"""Archive and retention: the older part of the stream goes to files, and only then from the server.

The event stream denies deletion and purge, and that cannot be taken back; nothing of it goes by accident. What an
operator may still set is an age limit. So a trim is: copy everything into the archive, make it durable, read it
back; then set the limit for a moment, wait until what is older has gone, and take it away again. Agents, their
consumers and the coordinator notice nothing.

Rules
-----
* What goes stands in the archive; what is younger than KEEP_LEAST_S stays, so that between the copy and the
  limit nothing can go that was not copied.
* The newest CoordinatorStarted stays: it is the token that fences appends. If it is too old, a coordinator must
  start first.
* The heartbeats that prove a node's loss or return go into the archive before it (`heartbeat_evidence.py`). Their
  stream forgets after BEAT_MAX_AGE_S, so an archive that is to hold them all is brought up to date more often than
  that.
* A limit that a crash left behind is marked in the stream's metadata, and taken away by the next start of a
  coordinator or of an archive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from unicrond.events.archive.archived_log import archived_batches, newest_archived, require_same
from unicrond.events.log.event_log import LogDamaged, LogError
from unicrond.events.log.heartbeat_evidence import NodeVerdict, NodeVerdicts, evidence, heartbeat_us_of, spans
from unicrond.events.log.segment_writer import SegmentWriter
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM, TERM_SUBJECT
from unicrond.events.log.subjects import entry as message
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.log_proof import LogProof
from unicrond.events.nats.reader import read_stream
from unicrond.events.nats.streams import NANOS, NO_MESSAGE_FOUND, TRIMMING, JetStreamError, api, end_trim
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.envelope import Entry, RecordedEvent

BATCH = 1000
KEEP_LEAST_S = 3600.0
_WAIT_S = 30.0


class ArchiveResult(NamedTuple):
    """The archive's contents after a run: entries 1 to `last_seq`, of which `copied` are new. `beats`: the heartbeats
    that were kept with those."""

    last_seq: int
    copied: int
    beats: int = 0


class CannotTrim(LogError):
    """Nothing was removed; the message says why and what to do."""


class TermTooOld(CannotTrim):
    """The newest term began before what is to stay: a coordinator must begin another one first."""


async def archive(connection: Connection, directory: Path) -> ArchiveResult:
    """Copy what is new in the event stream into `directory`, and read it back. Raises LogError, OSError."""
    log = NatsEventLog(connection, proof=LogProof(reader="this archive"))
    writer = SegmentWriter(directory)
    try:
        writer.repair()
        newest = newest_archived(directory)
        if newest is not None:
            await require_same(log, newest, directory)
        begin = newest.seq if newest is not None else 0
        last = await log.last_seq()
        beat_count = 0
        verdicts = NodeVerdicts(await _heartbeat_us(log))
        batch: list[Entry] = []
        async with aclosing(log.read(begin, until_seq=last)) as entries:
            async for entry in entries:
                batch.append(entry)
                if len(batch) == BATCH or entry.seq == last:
                    beats = await _evidence(connection, verdicts.among(batch))
                    writer.write(batch, sync=False, beats=beats)
                    beat_count += len(beats)
                    batch = []
    finally:
        writer.close()
    _read_back(directory, begin, last)
    return ArchiveResult(last, last - begin, beat_count)


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
    server_now = datetime.fromisoformat(info["ts"])
    cut = await _newest_older_than(connection, info, server_now.timestamp() - keep_s)
    if cut > newest.seq:
        raise CannotTrim(f"{directory}: ends with entry {newest.seq}, which is newer than entry {cut}; archive first")
    if cut < before:
        return 0
    term_seq = await _term_seq(connection)
    if term_seq <= cut:
        raise TermTooOld(
            f"the coordinator's term began with entry {term_seq}, and must stay; restart the coordinator, or keep more"
        )
    await _set_limit(connection, info, int(keep_s * NANOS))
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


async def clear_age_limit(connection: Connection) -> dict[str, Any]:
    """End a trim, our own or one that a crash left behind; return the stream's information."""
    info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    if TRIMMING in (info["config"].get("metadata") or {}):
        await end_trim(connection, EVENT_STREAM, info["config"])
        info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    return info


async def _heartbeat_us(log: NatsEventLog) -> int:
    """Return the heartbeat interval of the newest term. An older term inside the part that is read states its own."""
    newest = await log.newest_term()
    started = newest.envelope.event if isinstance(newest, RecordedEvent) else None
    return heartbeat_us_of(started) if isinstance(started, CoordinatorStarted) else 1_000_000


async def _evidence(connection: Connection, verdicts: list[NodeVerdict]) -> list[RecordedEvent]:
    """Return the heartbeats to keep for these verdicts, as far as the stream still has them."""
    beats: list[RecordedEvent] = []
    for from_us, to_us in spans(verdicts):
        beats += [beat async for beat in _beats(connection, from_us, to_us)]
    return evidence(verdicts, beats)


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


def _read_back(directory: Path, begin: int, last: int) -> None:
    """Read what was just written; raise LogDamaged where it does not end with entry `last`."""
    seq = begin
    for batch in archived_batches(directory, begin):
        for entry in batch:
            seq = max(seq, entry.seq)
    if seq != last:
        raise LogDamaged(f"{directory}: ends with entry {seq} after entries up to {last} were written")
