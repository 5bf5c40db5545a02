"""Asks the event stream itself, without appending, whether it would take an append.

The coordinator writes nothing for hours in which nothing happens; what would stop its next append (a limit that is
reached, a stream that is gone or was replaced) must show all the same. What a question cannot show (a disk that is
full) the agents notice, and their beats tell (event_log_health.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unicrond.core.state.alarms import Alarm
from unicrond.events.log.event_log import AnotherLog
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, NoReply
from unicrond.events.nats.log_proof import LogProof
from unicrond.events.nats.streams import NO_STREAM, JetStreamError, api_once
from unicrond.service.coordinator.follower import CURE


class StreamProbe:
    """Probes the event stream. `trouble`: by the last `look`, in one line; "" where nothing is wrong.

    `is_settled`: the stream itself refuses, by its own configuration or state; no restart of a server helps.
    """

    def __init__(
        self,
        connection: Connection,
        proof: LogProof,
        folded_seq: Callable[[], int],
        read_seqs: Callable[[], dict[str, int]] = dict,
        on_behind: Callable[[str], object] = lambda _: None,
        on_whole: Callable[[], object] = lambda: None,
    ) -> None:
        """Take what to compare the stream with. `proof`: of the known log. `folded_seq`: the last that was folded.
        `read_seqs`: of each node. `on_behind(reason)` is called when the stream ends before what was read, `on_whole()`
        when it holds that again: a restore that was under way has ended."""
        self._connection = connection
        self._proof = proof
        self._folded_seq = folded_seq
        self._read_seqs = read_seqs
        self._on_behind = on_behind
        self._on_whole = on_whole
        #: Why the stream is not as it was when it was read; "" where it is.
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
        """Ask once; an answer, or its absence, takes seconds. Raises AnotherLog."""
        folded_seq, read_seqs = self._folded_seq(), self._read_seqs()
        try:
            info = await api_once(self._connection, f"STREAM.INFO.{EVENT_STREAM}", {})
            mismatch = await self._compare(info, folded_seq)
        except NoReply as error:
            self.trouble, self.is_settled = f"NATS does not answer about the event log: {error}", False
        except JetStreamError as error:
            self.trouble = f"NATS has no event log: {error}"
            if error.code == NO_STREAM and folded_seq:
                self.trouble = f"NATS has no event log, and this head has read one of {folded_seq} entries; {CURE}"
            self.is_settled = not error.is_transient
        else:
            self.info = info
            self._ahead = ahead(info, read_seqs)
            self.trouble = mismatch
            was_behind, self.mismatch = bool(self.mismatch), mismatch
            if mismatch and not was_behind:
                self._on_behind(mismatch)
            elif was_behind and not mismatch:
                self._on_whole()
            self.trouble = self.trouble or refusal(info)
            self.is_settled = bool(self.trouble)

    async def _compare(self, info: dict[str, Any], folded_seq: int) -> str:
        """Return why the stream of this STREAM.INFO lacks what was folded; "" where it does not. Entries are asked for
        where it seems to, where it did before, and where it was made since the last proof. Raises AnotherLog, NoReply,
        JetStreamError."""
        is_short = info["state"]["last_seq"] < folded_seq
        if info["created"] == self._proof.created and not is_short and not self.mismatch:
            return ""
        difference = await self._proof.look(self._connection, info)
        if difference is not None and not difference.is_behind:
            raise AnotherLog(difference.reason)
        if not (is_short or difference):
            return ""
        return (
            f"stream {EVENT_STREAM} ends at entry {info['state']['last_seq']}, and the coordinator has read "
            f"{folded_seq}: the stream was recreated, or restored from an older backup"
        )


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
