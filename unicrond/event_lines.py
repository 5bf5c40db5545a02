"""Events as the HTTP API sends them (server-sent events), and as lines for people. No I/O."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import msgspec

from unicrond.tables import clean

#: What a person who watches wants to hear of; the rest is the machinery that brings it about.
NOTEWORTHY = frozenset(
    {
        "CheckpointSaved",
        "CommandFailed",
        "CoordinatorStarted",
        "ErrorReported",
        "MembershipDecided",
        "NodeIsolated",
        "NodeJoined",
        "NodeLeft",
        "NodeLost",
        "NodeReadmitted",
        "NodeReturned",
        "PlanAdopted",
        "Quarantined",
        "TaskCancelled",
        "TaskCompleted",
        "TaskFailed",
        "TaskSubmitted",
        "TransitionCompleted",
        "WorkerExited",
    }
)


class BadEventStream(ValueError):
    """What came is no event stream of a coordinator."""


class EventLine(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log. `quarantined`: why it is no event, or ""; then `summary` and `envelope` are empty."""

    seq: int
    recorded_at_us: int
    type: str
    summary: str = ""
    quarantined: str = ""
    envelope: dict[str, Any] = {}

    @property
    def noteworthy(self) -> bool:
        """Worth a line to somebody who watches. A worker that ended because it was told to is not."""
        expected = self.type == "WorkerExited" and self.envelope.get("event", {}).get("expected") is True
        return self.type in NOTEWORTHY and not expected

    @property
    def text(self) -> str:
        """What happened, on one line."""
        return clean(f"not a valid event: {self.quarantined}" if self.quarantined else self.summary)

    def clock(self, timespec: str = "seconds") -> str:
        """The log's receive time, local; `timespec` as in datetime.isoformat."""
        return datetime.fromtimestamp(self.recorded_at_us / 1e6).time().isoformat(timespec)


class EventStreamParser:
    """Lines in, events out: the part of the server-sent events format that the API uses."""

    def __init__(self) -> None:
        self._type = ""
        self._data: list[str] = []

    def feed(self, line: str) -> EventLine | None:
        """The event that `line` (without its end) completes. Raises BadEventStream."""
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                self._type = value
            elif field == "data":
                self._data.append(value)
            return None
        data, self._data = "\n".join(self._data), []
        kind, self._type = self._type, ""
        if not data:
            return None
        try:
            # json reads NaN, which a loss may be; msgspec's own decoder does not.
            return msgspec.convert({"type": kind, **json.loads(data)}, EventLine, strict=True)
        except (ValueError, TypeError) as error:
            raise BadEventStream(f"not understood: {clean(str(error))}") from None
