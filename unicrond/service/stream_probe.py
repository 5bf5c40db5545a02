"""Whether the event stream would take an append: asked of the stream itself, without appending.

The coordinator writes nothing for hours in which nothing happens; what would stop its next append (a limit that is
reached, a stream that is gone or was replaced) must show all the same. What a question cannot show (a disk that is
full) the agents notice, and their beats tell (log_keeper.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from events.nats_connection import Connection, Unanswered
from events.nats_streams import NO_STREAM, ApiError, api_once
from events.subjects import EVENT_STREAM
from unicrond.service.follower import CURE


class StreamProbe:
    """`trouble`: by the last `look`, in one line; "" where nothing is wrong.

    `is_settled`: it is the stream that refuses, by its own configuration or state; no restart of a server helps.
    """

    def __init__(
        self,
        connection: Connection,
        folded_seq: Callable[[], int],
        read_seqs: Callable[[], dict[str, int]] = dict,
        on_another: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`folded_seq`: the last entry that was read. `read_seqs`: of each node. `on_another(why)` is called when the
        stream is not the one of before."""
        self._connection = connection
        self._folded_seq = folded_seq
        self._read_seqs = read_seqs
        self._on_another = on_another
        #: When the stream was made, by the first answer; "" before.
        self.created = ""
        #: It is not the stream of before: why.
        self.another = ""
        self._ahead = ""
        self.trouble = ""
        self.is_settled = False
        #: The newest answer, None before the first.
        self.info: dict[str, Any] | None = None

    def alarms(self) -> list[str]:
        """What a person has to look at."""
        return [self._ahead] if self._ahead else []

    async def look(self) -> None:
        """One question, answered within seconds or not."""
        folded_seq, read_seqs = self._folded_seq(), self._read_seqs()
        try:
            info = await api_once(self._connection, f"STREAM.INFO.{EVENT_STREAM}", {})
        except Unanswered as error:
            self.trouble, self.is_settled = f"NATS does not answer about the event log: {error}", False
        except ApiError as error:
            self.trouble = f"NATS has no event log: {error}"
            if error.code == NO_STREAM and self.created:
                self.trouble = f"NATS has no event log, and this head has read one of {folded_seq} entries; {CURE}"
            self.is_settled = not error.is_passing
        else:
            self.info = info
            self.created = self.created or info["created"]
            self._ahead = ahead(info, read_seqs)
            self.trouble = other(info, folded_seq, self.created)
            if self.trouble and not self.another:
                self.another = self.trouble
                self._on_another(self.another)
            self.trouble = self.trouble or refusal(info)
            self.is_settled = bool(self.trouble)


def other(info: dict[str, Any], folded_seq: int, created: str) -> str:
    """Why the stream of this STREAM.INFO is not the one that was read; "" where it is."""
    if info["state"]["last_seq"] < folded_seq:
        return (
            f"stream {EVENT_STREAM} ends at entry {info['state']['last_seq']}, and the coordinator has read "
            f"{folded_seq}: the stream was recreated, or restored from an older backup"
        )
    if info["created"] != created:
        return f"stream {EVENT_STREAM} was made anew at {info['created']}; the one of {created} is gone"
    return ""


def ahead(info: dict[str, Any], read_seqs: Mapping[str, int]) -> str:
    """Which nodes have read beyond the stream's end: what they have read is lost."""
    end = info["state"]["last_seq"]
    nodes = sorted(node for node, seq in read_seqs.items() if seq > end)
    if not nodes:
        return ""
    names = ", ".join([*nodes[:3], *(["..."] if len(nodes) > 3 else [])])
    return (
        f"the log ends at entry {end}, and nodes have read up to {max(read_seqs.values())} ({names}): entries are lost"
    )


def refusal(info: dict[str, Any]) -> str:
    """Why the stream of this STREAM.INFO takes no append; "" where it does."""
    config, state = info["config"], info["state"]
    if config.get("sealed"):
        return f"stream {EVENT_STREAM} is sealed"
    for limit, held in (("max_msgs", "messages"), ("max_bytes", "bytes")):
        most = config.get(limit, -1)
        if most > 0 and state[held] >= most:
            flag = limit.replace("_", "-")
            return (
                f"stream {EVENT_STREAM} holds {state[held]} {held}, and {limit} lets it hold {most}: "
                f"raise it (nats stream edit {EVENT_STREAM} --{flag}=-1)"
            )
    return ""
