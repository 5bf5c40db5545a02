"""Skipped entries: `unicrond run --skip` writes them, and they are read before anything is folded.

Rules
-----
* `EntrySkipped` stands in the log after the entry that it names, on a subject of its own. Every fold of the log asks
  for all of them first (`EventLog.skips`) and reads a skipped entry as a quarantined message, wherever the reading
  begins or ends: the state at any point, before the skip as well, is the same for every reader.
* A claim of a term and a skip itself cannot be skipped: fences and readers rest on them.
* The entry stays in the log, in the archive too; an export that was cut shows it as what it counts for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from unicrond.events.log.segments import TornTail, read_segment
from unicrond.events.log.subjects import subject
from unicrond.events.vocabulary import CoordinatorStarted, EntrySkipped
from unicrond.events.wire.envelope import Entry, QuarantinedMessage, RecordedEvent

_TAG = EntrySkipped.__name__.encode()


def skips_in(entries: Iterable[Entry]) -> dict[int, str]:
    """Return all skips among `entries`: sequence number -> reason."""
    skips: dict[int, str] = {}
    for entry in entries:
        event = entry.envelope.event if isinstance(entry, RecordedEvent) else None
        if isinstance(event, EntrySkipped) and event.seq < entry.seq:
            skips.setdefault(event.seq, event.reason)
    return skips


def skips_in_files(segments: Sequence[Path]) -> dict[int, str]:
    """Return all skips in segment files; files that name no skip are searched, not decoded."""
    skips: dict[int, str] = {}
    for segment in segments:
        if _TAG not in segment.read_bytes():
            continue
        try:
            for batch in read_segment(segment):
                skips = skips_in(batch.entries) | skips
        except TornTail:
            break  # reading the entries says so
    return skips


def can_be_skipped(entry: Entry) -> bool:
    """Say whether the entry is neither a claim nor a skip."""
    return isinstance(entry, QuarantinedMessage) or not isinstance(
        entry.envelope.event, CoordinatorStarted | EntrySkipped
    )


def apply_skips(entry: Entry, skips: Mapping[int, str]) -> Entry:
    """Return the entry as it is to be folded: as a quarantined message where it is skipped."""
    if entry.seq not in skips or isinstance(entry, QuarantinedMessage) or not can_be_skipped(entry):
        return entry
    return QuarantinedMessage(
        entry.seq, entry.recorded_at_us, subject(entry.envelope), f"skipped by an operator: {skips[entry.seq]}", 0
    )
