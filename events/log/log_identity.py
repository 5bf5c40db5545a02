"""Tells one log from another by the entries in it. Pure.

Rules
-----
* A log is known by some of its entries (`LogMark`): the first that its stream holds, and the newest that was read (of
  an agent: the newest claim of a term). Each must stand at its number still, or this is another log.
* A log that ends before what is known of it is behind: it was restored from an older backup, or has lost its end.
* When its stream was made says nothing where an entry can be compared: a complete restore, by whatever program, is the
  log. Where none can be, since all that is known was trimmed away, the same stream is the same log, and any other is
  another one.
* Of a log without entries nothing is known.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from unicrond.events.wire.envelope import Entry, QuarantinedMessage


class LogMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry, as far as it tells its log from another. `event_id`: "" where it is no event, or not known."""

    seq: int
    recorded_at_us: int
    event_id: str


class LogPoints(NamedTuple):
    """The facts by which a log is known or recognised. `created`: when its stream was made, as NATS reports it, ""
    where that is not known. `last_seq`: of its last entry."""

    created: str = ""
    last_seq: int = 0
    marks: tuple[LogMark, ...] = ()


class LogDifference(NamedTuple):
    """How a log differs from the known one, in one line. `is_behind`: it may be the same, and ends earlier."""

    reason: str
    is_behind: bool = False


def mark_of(entry: Entry) -> LogMark:
    """Return the mark of an entry."""
    event_id = "" if isinstance(entry, QuarantinedMessage) else entry.envelope.event_id
    return LogMark(entry.seq, entry.recorded_at_us, event_id)


def difference(memory: LogPoints, log: LogPoints, reader: str) -> LogDifference | None:
    """Return how `log` differs from the one that the reader ("this head") remembers; None where it is that one, or
    nothing is remembered."""
    marks = {mark.seq: mark for mark in log.marks}
    pairs = [(mark, marks[mark.seq]) for mark in memory.marks if mark.seq in marks]
    for remembered_mark, mark in pairs:
        if not _is_same(remembered_mark, mark):
            return LogDifference(f"entry {mark.seq} of the event log is another than the one that {reader} knows")
    if log.last_seq < memory.last_seq:
        return LogDifference(
            f"the event log ends at entry {log.last_seq}, and {reader} knows entry {memory.last_seq}", is_behind=True
        )
    if pairs or not memory.created or log.created == memory.created:
        return None
    return LogDifference(
        f"the event log was made at {log.created}, and holds none of the entries by which {reader} knows the one made "
        f"at {memory.created}"
    )


def _is_same(left: LogMark, right: LogMark) -> bool:
    """Say whether two marks of one number are of one entry: versions may differ in what they can read."""
    has_ids = bool(left.event_id and right.event_id)
    return left.recorded_at_us == right.recorded_at_us and (not has_ids or left.event_id == right.event_id)
