"""The proof, on each connection, that the log which answers is the known one (`log/log_identity.py`).

Rules
-----
* Before the first entry that a reading takes from any connection, and before anything is written on it, the server is
  asked for the entries by which the log is known.
* A log that is gone or ends earlier is waited for: it may come back. Another one raises AnotherLog.
* What a login may not ask is no proof: it waits.
"""

from __future__ import annotations

from typing import Any

from unicrond.events.log import log_identity
from unicrond.events.log.event_log import AnotherLog
from unicrond.events.log.log_identity import LogDifference, LogMark, LogPoints
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, NoReply, Session
from unicrond.events.nats.stored_message import stored_entry
from unicrond.events.nats.streams import NO_MESSAGE_FOUND, JetStreamError, api_once


class LogProof:
    """What one reader knows of its log. `created`: when the stream was made in which that was found last; "" before.
    `first`: the log's first entry, where it was ever seen. `newest`: the last entry that was read. `reader`: in words.
    """

    def __init__(
        self,
        created: str = "",
        first: LogMark | None = None,
        newest: LogMark | None = None,
        *,
        reader: str = "this head",
    ) -> None:
        self._reader = reader
        self.created = created
        self.first = first
        self.newest = newest
        self._proven: Session | None = None

    def note(self, mark: LogMark) -> None:
        """Note an entry that was read from a log that has proved to be the known one."""
        if self.newest is None or mark.seq > self.newest.seq:
            self.newest = mark

    async def look(self, source: Connection | Session, info: dict[str, Any] | None = None) -> LogDifference | None:
        """Compare the log that answers with the known one; return how it differs. `info`: the stream's, if it was asked
        for just now. Raises NoReply, JetStreamError."""
        newest = self.newest
        memory = LogPoints(
            self.created if newest is not None else "",
            newest.seq if newest is not None else 0,
            tuple(mark for mark in (self.first, newest) if mark is not None),
        )
        if info is None:
            info = await api_once(source, f"STREAM.INFO.{EVENT_STREAM}", {})
        state = info["state"]
        marks = [
            mark
            for seq in sorted({1, *(mark.seq for mark in memory.marks)})
            if state["first_seq"] <= seq <= state["last_seq"] and (mark := await _mark(source, seq)) is not None
        ]
        difference = log_identity.difference(
            memory, LogPoints(info["created"], state["last_seq"], tuple(marks)), self._reader
        )
        if difference is None:
            self.created = info["created"]
            if self.first is None:
                self.first = next((mark for mark in marks if mark.seq == 1), None)
        return difference

    async def require(self, session: Session) -> None:
        """Return where the log that this session reaches is the known one. Raises AnotherLog, and NoReply where it
        cannot be known yet."""
        try:
            difference = await self.look(session)
        except JetStreamError as error:
            raise NoReply(str(error)) from None
        if difference is not None and difference.is_behind:
            raise NoReply(difference.reason)
        if difference is not None:
            raise AnotherLog(difference.reason)
        self._proven = session

    async def require_once(self, session: Session) -> None:
        """Call `require` where this session has not proved it yet."""
        if self._proven is not session:
            await self.require(session)


async def _mark(source: Connection | Session, seq: int) -> LogMark | None:
    """Return the mark of the entry of this number; None where the stream does not hold it."""
    try:
        reply = await api_once(source, f"STREAM.MSG.GET.{EVENT_STREAM}", {"seq": seq})
    except JetStreamError as error:
        if error.code != NO_MESSAGE_FOUND:
            raise
        return None
    return log_identity.mark_of(stored_entry(reply["message"]))
