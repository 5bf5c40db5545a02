"""Asks the event stream itself, without appending, whether it would take an append.

The coordinator writes nothing for hours in which nothing happens; what would stop its next append (a limit that is
reached, a stream that is gone or was replaced) must show all the same. What a question cannot show (a disk that is
full) the agents notice, and their beats tell (event_log_health.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unicrond.core.state.alarms import Alarm
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, NoReply
from unicrond.events.nats.streams import NO_STREAM, JetStreamError, api_once
from unicrond.service.coordinator.follower import CURE


class StreamProbe:
    """Probes the event stream. `trouble`: by the last `look`, in one line; "" where nothing is wrong.

    `is_settled`: the stream itself refuses, by its own configuration or state; no restart of a server helps.
    """

    def __init__(
        self,
        connection: Connection,
        folded_seq: Callable[[], int],
        read_seqs: Callable[[], dict[str, int]] = dict,
        on_another: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Take what to compare the stream with. `folded_seq`: the last entry that was read. `read_seqs`: of each node.
        `on_another(reason)` is called when the stream is not the one that was read before."""
        self._connection = connection
        self._folded_seq = folded_seq
        self._read_seqs = read_seqs
        self._on_another = on_another
        #: When the stream was made, by the first answer; "" before.
        self.created = ""
        #: Why the stream is not the one that was read before; "" where it is.
        self.mismatch = ""
        self._ahead = ""
        self.trouble = ""
        self.is_settled = False
        #: The newest answer, None before the first.
        self.info: dict[str, Any] | None = None

    def alarms(self) -> list[Alarm]:
        """Return what a person has to look at."""
        return [Alarm("log-truncated", self._ahead)] if self._ahead else []

    async def look(self) -> None:
        """Ask once; an answer, or its absence, takes seconds."""
        folded_seq, read_seqs = self._folded_seq(), self._read_seqs()
        try:
            info = await api_once(self._connection, f"STREAM.INFO.{EVENT_STREAM}", {})
        except NoReply as error:
            self.trouble, self.is_settled = f"NATS does not answer about the event log: {error}", False
        except JetStreamError as error:
            self.trouble = f"NATS has no event log: {error}"
            if error.code == NO_STREAM and self.created:
                self.trouble = f"NATS has no event log, and this head has read one of {folded_seq} entries; {CURE}"
            self.is_settled = not error.is_transient
        else:
            self.info = info
            self.created = self.created or info["created"]
            self._ahead = ahead(info, read_seqs)
            self.trouble = mismatch(info, folded_seq, self.created)
            if self.trouble and not self.mismatch:
                self.mismatch = self.trouble
                self._on_another(self.mismatch)
            self.trouble = self.trouble or refusal(info)
            self.is_settled = bool(self.trouble)


def mismatch(info: dict[str, Any], folded_seq: int, created: str) -> str:
    """Return why the stream of this STREAM.INFO is not the one that was read; "" where it is."""
    if info["state"]["last_seq"] < folded_seq:
        return (
            f"stream {EVENT_STREAM} ends at entry {info['state']['last_seq']}, and the coordinator has read "
            f"{folded_seq}: the stream was recreated, or restored from an older backup"
        )
    if info["created"] != created:
        return f"stream {EVENT_STREAM} was made anew at {info['created']}; the one of {created} is gone"
    return ""


def ahead(info: dict[str, Any], read_seqs: Mapping[str, int]) -> str:
    """Return which nodes have read beyond the stream's end, in one line: what they have read is lost."""
    end = info["state"]["last_seq"]
    nodes = sorted(node for node, seq in read_seqs.items() if seq > end)
    if not nodes:
        return ""
    names = ", ".join([*nodes[:3], *(["..."] if len(nodes) > 3 else [])])
    return (
        f"the log ends at entry {end}, and nodes have read up to {max(read_seqs.values())} ({names}): entries are lost"
    )


def refusal(info: dict[str, Any]) -> str:
    """Return why the stream of this STREAM.INFO takes no append; "" where it does."""
    config, state = info["config"], info["state"]
    if config.get("sealed"):
        return f"stream {EVENT_STREAM} is sealed"
    for limit, unit in (("max_msgs", "messages"), ("max_bytes", "bytes")):
        most = config.get(limit, -1)
        if most > 0 and state[unit] >= most:
            flag = limit.replace("_", "-")
            return (
                f"stream {EVENT_STREAM} holds {state[unit]} {unit}, and {limit} lets it hold {most}: "
                f"raise it (nats stream edit {EVENT_STREAM} --{flag}=-1)"
            )
    return ""
