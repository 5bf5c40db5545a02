"""Which log is which, by the entries in it."""

from __future__ import annotations

import pytest

from tests.contracts.logs import facts
from unicrond.events.log.log_identity import LogMark, LogPoints, difference, mark_of
from unicrond.events.wire.envelope import QuarantinedMessage, RecordedEvent

FIRST, LAST = LogMark(1, 1_000, "n1-1-1"), LogMark(40, 9_000, "n1-1-40")
KNOWN = LogPoints("made first", 40, (FIRST, LAST))
UNTOLD = "holds none of the entries by which this head knows the one made at made first"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (LogPoints("made first", 40, (FIRST, LAST)), ""),
        (LogPoints("restored later", 40, (FIRST, LAST)), ""),
        (LogPoints("restored later", 90, (LAST,)), ""),
        (LogPoints("restored later", 90, (LogMark(7, 2_000, ""), FIRST)), ""),
        (LogPoints("made first", 90, (LogMark(70, 9_500, "n1-1-70"),)), ""),
        (LogPoints("made later", 90, (LogMark(70, 9_500, "n1-1-70"),)), UNTOLD),
        (LogPoints("made first", 90, (LogMark(1, 1_001, "n1-1-1"), LAST)), "entry 1 of the event log is another"),
        (LogPoints("made first", 90, (FIRST, LogMark(40, 9_000, "n1-1-41"))), "entry 40 of the event log is another"),
        (LogPoints("made later", 2, (LogMark(1, 1_001, "n1-1-1"),)), "entry 1 of the event log is another"),
        (LogPoints("made first", 39, (FIRST,)), "ends at entry 39, and this head knows entry 40"),
        (LogPoints("made later", 0), "ends at entry 0, and this head knows entry 40"),
    ],
)
def test_difference_follows_entries(log: LogPoints, words: str) -> None:
    found = difference(KNOWN, log, "this head")
    assert (found is None) == (not words)
    assert found is None or (words in found.reason and found.is_behind == ("ends at" in words))
    assert difference(LogPoints(), log, "this head") is None, "nothing is known"


def test_unread_event_is_same_entry() -> None:
    """What one version cannot read, the next one may."""
    entry = RecordedEvent(1, 1_000, facts(1, 1)[0], b"")
    unread = mark_of(QuarantinedMessage(1, 1_000, "a.subject", "a reason", 7))
    assert mark_of(entry).event_id and not unread.event_id
    assert difference(LogPoints("", 1, (unread,)), LogPoints("", 1, (mark_of(entry),)), "this head") is None
