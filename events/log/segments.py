"""Segment files: how a log stands on disk, and how it is exported.

Format
------
    segment = magic, frame(header), frame(batch), frame(batch), ...
    frame   = head, body; head = body length, CRC-32 of the body, CRC-32 of these 8 bytes (4 bytes each,
              big-endian): a length that can be trusted tells an unfinished frame from a broken one
    header  = msgpack map {format, schema, first_seq}; schema 1: each message says its own
    batch   = msgpack array of records: one append, so that a batch is whole or absent
    record  = ["e", seq, recorded_at_us, envelope as it stands on the wire]
            | ["q", seq, recorded_at_us, subject, reason, size_bytes]      (a quarantined message)
            | ["b", seq, recorded_at_us, envelope]      (a heartbeat, by the numbers of its own stream; format 2)
            | ["z", entries, heartbeats]                (the end mark of an export: how many it holds; format 3)

Format 1 had no heartbeats; it is read as well. An export has format 3, the segments of a log that goes on have
format 2: they have no end, and of an older export, which has no mark, it is unknown whether it is whole. A
segment is named after its first sequence number, 20 digits and ".log".

Rules
-----
* A frame that reaches to the end of the file and is not whole (or zeros to the end) is a *torn tail*: a
  write that a crash interrupted, never acknowledged. Only `cut_torn_tail` removes it.
* An export (format 3) has no torn tail: without its end mark it is *cut*, and damage.
* Everything else that does not fit (a checksum in the middle, a missing number, another format) is
  *damage*: LogDamaged, with file and offset. Nothing is skipped silently.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import msgspec

from unicrond.events.log.event_log import LogDamaged
from unicrond.events.vocabulary import Heartbeat
from unicrond.events.wire.codec import BadEvent, body_of, decode, encode, read
from unicrond.events.wire.envelope import Entry, QuarantinedMessage, RecordedEvent
from unicrond.events.wire.schemas import FIRST, SCHEMA

MAGIC = b"UNICRON\x01"
FORMAT = 2
#: Of an export in one file, which says where it ends.
EXPORT_FORMAT = 3
FRAME_HEAD_BYTES = 12
#: No end mark's body is longer.
_END_BYTES_MAX = 64
MAX_FRAME_BYTES = 512 * 1024 * 1024


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    schema: int
    first_seq: int


class _EventRecord(msgspec.Struct, frozen=True, array_like=True, tag="e", forbid_unknown_fields=True):
    seq: int
    recorded_at_us: int
    body: bytes


class _QuarantineRecord(msgspec.Struct, frozen=True, array_like=True, tag="q", forbid_unknown_fields=True):
    seq: int
    recorded_at_us: int
    subject: str
    reason: str
    size_bytes: int


class _BeatRecord(msgspec.Struct, frozen=True, array_like=True, tag="b", forbid_unknown_fields=True):
    seq: int
    recorded_at_us: int
    body: bytes


class _EndRecord(msgspec.Struct, frozen=True, array_like=True, tag="z", forbid_unknown_fields=True):
    entries: int
    beats: int


_Record: TypeAlias = _EventRecord | _QuarantineRecord | _BeatRecord | _EndRecord
_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)
_batch_decoder = msgspec.msgpack.Decoder(list[_Record])


class TornTail(LogDamaged):
    """The file ends in an unfinished frame. `whole_bytes`: where the last whole frame ends."""

    def __init__(self, path: Path, whole_bytes: int) -> None:
        super().__init__(f"{path}: ends in an unfinished frame at byte {whole_bytes}")
        self.whole_bytes = whole_bytes


class SegmentBatch(NamedTuple):
    """One frame's entries, where the frame ends in its file, and its heartbeats."""

    entries: list[Entry]
    end_bytes: int
    beats: Sequence[RecordedEvent] = ()


def segment_name(first_seq: int) -> str:
    """Return the file name of the segment that begins with `first_seq`."""
    return f"{first_seq:020d}.log"


def segment_paths(path: Path) -> list[Path]:
    """Return the segments of a directory in order, or a single segment file itself."""
    if path.is_dir():
        return sorted(path.glob("[0-9]" * 20 + ".log"))
    return [path]


def segment_start(first_seq: int) -> bytes:
    """Return the bytes with which a segment begins."""
    return MAGIC + _frame(_encoder.encode(_Header(FORMAT, FIRST, first_seq)))


def export_start() -> bytes:
    """Return the bytes with which an export in one file begins; `end_frame` ends it."""
    return MAGIC + _frame(_encoder.encode(_Header(EXPORT_FORMAT, FIRST, 1)))


def end_frame(entries: int, beats: int) -> bytes:
    """Return an export's end mark: how many entries and heartbeats stand before it."""
    return _frame(_encoder.encode([_EndRecord(entries, beats)]))


def batch_frame(entries: Sequence[Entry]) -> bytes:
    """Encode one append as a frame."""
    return _frame(_encoder.encode([_record(entry) for entry in entries]))


def beats_frame(beats: Sequence[RecordedEvent]) -> bytes:
    """Encode heartbeats as a frame; they stand beside the log, not in its order."""
    return _frame(_encoder.encode([_BeatRecord(b.seq, b.recorded_at_us, encode(b.envelope)) for b in beats]))


def read_segment(path: Path, from_bytes: int = 0) -> Iterator[SegmentBatch]:
    """Yield the batches of one segment, streaming; `from_bytes`: the end of a batch read before. Raises TornTail,
    LogDamaged.

    Ends at the end of the file. A header frame gives no batch. An export that was cut yields nothing (LogDamaged).
    """
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        end_bytes = from_bytes
        entry_count = beat_count = 0
        if from_bytes == 0:
            end_bytes, file_format = _read_header(path, file, size_bytes)
            if file_format >= EXPORT_FORMAT:
                _require_end(path, file, end_bytes, size_bytes)
        file.seek(end_bytes)
        while (body := _read_frame(path, file, end_bytes, size_bytes)) is not None:
            end_bytes += FRAME_HEAD_BYTES + len(body)
            try:
                records = _batch_decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise LogDamaged(f"{path}: the frame that ends at byte {end_bytes} is not a batch: {error}") from None
            entries: list[Entry] = []
            beat_records: list[_BeatRecord] = []
            end_records: list[_EndRecord] = []
            for record in records:
                if isinstance(record, _EventRecord):  # nearly all
                    entries.append(_entry(record))
                elif isinstance(record, _QuarantineRecord):
                    entries.append(_quarantined(record))
                elif isinstance(record, _BeatRecord):
                    beat_records.append(record)
                else:
                    end_records.append(record)
            entry_count, beat_count = entry_count + len(entries), beat_count + len(beat_records)
            for end in end_records:
                if from_bytes == 0:
                    _require_all(path, end, entry_count, beat_count)
            if entries or beat_records:
                yield SegmentBatch(entries, end_bytes, [beat for record in beat_records if (beat := _beat(record))])


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield every entry of an exported log (a directory of segments or one segment file), streaming.

    Raises LogDamaged where it is not whole: a gap between numbers, a broken or unfinished frame, nothing at all.
    """
    segments = segment_paths(path)
    if not segments:
        raise LogDamaged(f"{path}: holds no segment (a file with a name like {segment_name(1)})")
    seq = 0
    for segment in segments:
        for batch in read_segment(segment):
            for entry in batch.entries:
                if seq and entry.seq != seq + 1:
                    raise LogDamaged(f"{segment}: entry {entry.seq} follows entry {seq}")
                seq = entry.seq
                yield entry


def cut_torn_tail(path: Path) -> int:
    """Shorten a segment to its whole frames and make that durable; return the number of bytes cut."""
    try:
        for _ in read_segment(path):
            pass
    except TornTail as torn:
        with path.open("r+b") as file:
            cut_bytes = os.fstat(file.fileno()).st_size - torn.whole_bytes
            file.truncate(torn.whole_bytes)
            os.fsync(file.fileno())
        return cut_bytes
    return 0


def _frame(body: bytes) -> bytes:
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a batch of {len(body)} bytes exceeds {MAX_FRAME_BYTES}; append fewer envelopes at once")
    head = len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big")
    return head + zlib.crc32(head).to_bytes(4, "big") + body


def has_end_mark(path: Path) -> bool:
    """Say whether the file is of the kind that states where it ends; a part of any other looks whole.

    Raises TornTail, LogDamaged.
    """
    with path.open("rb") as file:
        return _read_header(path, file, os.fstat(file.fileno()).st_size)[1] >= EXPORT_FORMAT


def _require_end(path: Path, file: BinaryIO, at_bytes: int, size_bytes: int) -> None:
    """Raise LogDamaged where no end mark follows `at_bytes`. The reader of the frames finds other damage."""
    while at_bytes < size_bytes:
        file.seek(at_bytes)
        head = file.read(FRAME_HEAD_BYTES)
        if len(head) < FRAME_HEAD_BYTES or not head.strip(b"\0"):
            break
        if zlib.crc32(head[:8]) != int.from_bytes(head[8:], "big"):
            return
        length = int.from_bytes(head[:4], "big")
        if length <= _END_BYTES_MAX and _is_end(head, file.read(length)):
            return
        at_bytes += FRAME_HEAD_BYTES + length
    raise LogDamaged(f"{path}: cut short: it lacks the end mark of an export; export the log again")


def _is_end(head: bytes, body: bytes) -> bool:
    if zlib.crc32(body) != int.from_bytes(head[4:8], "big"):
        return False
    try:
        return any(isinstance(record, _EndRecord) for record in _batch_decoder.decode(body))
    except msgspec.MsgspecError:
        return False


def _require_all(path: Path, end: _EndRecord, entries: int, beats: int) -> None:
    """Raise LogDamaged where the counts differ from those in the end mark."""
    if (entries, beats) != (end.entries, end.beats):
        expected, actual = f"{end.entries} entries and {end.beats} heartbeats", f"{entries} and {beats}"
        raise LogDamaged(f"{path}: its end mark says {expected}, it holds {actual}; export the log again")


def _read_header(path: Path, file: BinaryIO, size_bytes: int) -> tuple[int, int]:
    """Check magic and header; return where the header ends, and the format."""
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        if MAGIC.startswith(magic) or not magic.strip(b"\0"):
            raise TornTail(path, 0)
        raise LogDamaged(f"{path}: not an event log (it begins with {magic!r})")
    try:
        body = _read_frame(path, file, len(MAGIC), size_bytes)
    except TornTail:
        body = None
    if body is None:
        raise TornTail(path, 0)
    try:
        header = _header_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise LogDamaged(f"{path}: the header is broken: {error}") from None
    if not 1 <= header.format <= EXPORT_FORMAT or header.schema > SCHEMA:
        raise LogDamaged(
            f"{path}: has format {header.format}, schema {header.schema};"
            f" this version reads formats up to {EXPORT_FORMAT}, schemas up to {SCHEMA}"
        )
    return len(MAGIC) + FRAME_HEAD_BYTES + len(body), header.format


def _read_frame(path: Path, file: BinaryIO, at_bytes: int, size_bytes: int) -> bytes | None:
    """Read the body of the frame at `at_bytes`; return None at `size_bytes`, where the file ended when it was
    opened."""
    if at_bytes >= size_bytes:
        return None
    head = file.read(FRAME_HEAD_BYTES)
    if len(head) < FRAME_HEAD_BYTES:
        raise TornTail(path, at_bytes)
    if zlib.crc32(head[:8]) != int.from_bytes(head[8:], "big"):
        if _only_zeros(file, head):
            raise TornTail(path, at_bytes)
        raise LogDamaged(f"{path}: no frame begins at byte {at_bytes}")
    length = int.from_bytes(head[:4], "big")
    end_bytes = at_bytes + FRAME_HEAD_BYTES + length
    if end_bytes > size_bytes:
        raise TornTail(path, at_bytes)
    body = file.read(length)
    if zlib.crc32(body) == int.from_bytes(head[4:8], "big"):
        return body
    if end_bytes == size_bytes:
        raise TornTail(path, at_bytes)
    raise LogDamaged(f"{path}: the frame at byte {at_bytes} has a wrong checksum")


def _only_zeros(file: BinaryIO, begin: bytes) -> bool:
    chunk = begin
    while chunk:
        if chunk.strip(b"\0"):
            return False
        chunk = file.read(1 << 20)
    return True


def _record(entry: Entry) -> _EventRecord | _QuarantineRecord:
    if isinstance(entry, RecordedEvent):
        return _EventRecord(entry.seq, entry.recorded_at_us, body_of(entry))
    return _QuarantineRecord(entry.seq, entry.recorded_at_us, entry.subject, entry.reason, entry.size_bytes)


def _entry(record: _EventRecord) -> Entry:
    try:
        envelope, unknown = read(record.body)
        return RecordedEvent(record.seq, record.recorded_at_us, envelope, record.body if unknown else b"")
    except BadEvent as error:
        return QuarantinedMessage(record.seq, record.recorded_at_us, "", error.reason, len(record.body))


def _quarantined(record: _QuarantineRecord) -> QuarantinedMessage:
    return QuarantinedMessage(record.seq, record.recorded_at_us, record.subject, record.reason, record.size_bytes)


def _beat(record: _BeatRecord) -> RecordedEvent | None:
    """Decode the heartbeat; return None for anything else, which proves nothing."""
    try:
        envelope = decode(record.body)
    except BadEvent:
        return None
    return RecordedEvent(record.seq, record.recorded_at_us, envelope) if isinstance(envelope.event, Heartbeat) else None
