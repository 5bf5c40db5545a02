"""Import: the entries of an exported log into an empty one, to look at it with other tools or to try a recovery.

Rules
-----
* The target holds nothing yet, or nothing is written at all.
* Numbers, producers, their counters and the order are kept. In files the recorded times are kept too, so that
  the imported log has the digests of the original, and the heartbeats, so that it verifies as that does. On NATS the
  server dates what it stores: the times are those of the import, and with them the digests; what the events
  themselves say is the same.
* A server is a target only if no cluster lives there: the stream must be new (it is marked as imported, and no
  coordinator will work on it), and no agent's consumer or heartbeat may be there. Old commands must reach no agent.
* A quarantined message is imported as its size in zeros, which is quarantined again: its bytes were not exported.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

from unicrond.events.log.event_log import MAX_BATCH, LogError
from unicrond.events.log.segment_writer import LOCK, SegmentWriter
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM, PREFIX, headers, subject
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.streams import IMPORTED, JetStreamError, answer, api, beat_stream_config, event_stream_config
from unicrond.events.wire.codec import MAX_EVENT_BYTES, body_of
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.replay.reading.source import LogChunk

_STREAM_NOT_FOUND = 10059


class NotEmpty(LogError):
    """The target of an import holds something already, or a cluster lives there."""


async def import_to_directory(
    chunks: AsyncGenerator[LogChunk, None], directory: Path, beats: AsyncGenerator[list[RecordedEvent], None]
) -> int:
    """Write segments into a new or empty directory, and return the last sequence number. Raises NotEmpty, LogError."""
    writer = _writer(directory)
    last, is_whole = 0, False
    try:
        async with aclosing(chunks), aclosing(beats):
            pending_beats = [beat async for batch in beats for beat in batch]
            async for chunk in chunks:
                if chunk.entries:
                    writer.write(chunk.entries, sync=False, beats=pending_beats)
                    last, pending_beats = chunk.entries[-1].seq, []
        is_whole = True
    finally:
        writer.close()
        if not is_whole:  # or a part would pass for a shorter log
            for path in writer.segments:
                path.unlink()
    return last


async def import_to_nats(chunks: AsyncGenerator[LogChunk, None], connection: Connection) -> int:
    """Write the entries into the event stream of a server that has none, and return the last sequence number. Raises
    NotEmpty, LogError."""
    await _require_no_cluster(connection)
    config = event_stream_config()
    await api(connection, f"STREAM.CREATE.{EVENT_STREAM}", {**config, "metadata": {IMPORTED: "true"}})
    await api(connection, f"STREAM.CREATE.{BEAT_STREAM}", beat_stream_config())
    event_ids: set[str] = set()
    last = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            for begin in range(0, len(chunk.entries), MAX_BATCH):
                batch = chunk.entries[begin : begin + MAX_BATCH]
                last = await _write(connection, batch, event_ids)
                if last != batch[-1].seq:
                    raise LogError(f"{connection.urls}: entry {batch[-1].seq} was stored as {last}; delete the stream")
    return last


def _writer(directory: Path) -> SegmentWriter:
    if directory.exists() and any(path.name != LOCK for path in directory.iterdir()):
        raise NotEmpty(f"{directory}: is not empty; import into a new directory")
    return SegmentWriter(directory)


async def _require_no_cluster(connection: Connection) -> None:
    for stream in (EVENT_STREAM, BEAT_STREAM):
        try:
            info = await api(connection, f"STREAM.INFO.{stream}", {})
        except JetStreamError as error:
            if error.code != _STREAM_NOT_FOUND:
                raise
            continue
        count = info["state"]["messages"]
        raise NotEmpty(
            f"{connection.urls}: has a stream {stream} ({count} messages) already: a cluster may live there;"
            " import into a nats-server of its own, started for this"
        )


async def _write(connection: Connection, batch: Sequence[Entry], event_ids: set[str]) -> int:
    """Write one atomic batch, and return the number of its last message. A lost answer ends the import: a person starts
    it again on an empty server."""
    session = await connection.session()
    batch_id = uuid.uuid4().hex
    for number, entry in enumerate(batch, start=1):
        marks = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number)}
        if isinstance(entry, RecordedEvent):
            on_subject, body = subject(entry.envelope), body_of(entry)
            marks |= headers(entry.envelope)
            if entry.envelope.event_id in event_ids:  # a repeated event stands in the log twice, and shall again
                del marks["Nats-Msg-Id"]
            event_ids.add(entry.envelope.event_id)
        else:
            on_subject = entry.subject or f"{PREFIX}.obs.unknown.QuarantinedMessage"
            body = bytes(min(entry.size_bytes, MAX_EVENT_BYTES))
        if number < len(batch):
            await session.publish(on_subject, body, marks)
        else:
            reply = await session.request(on_subject, body, {**marks, "Nats-Batch-Commit": "1"})
    return int(answer(EVENT_STREAM, reply.data)["seq"])
