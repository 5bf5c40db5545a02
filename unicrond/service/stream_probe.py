"""Whether the event stream would take an append: asked of the stream itself, without appending.

The coordinator writes nothing for hours in which nothing happens; what would stop its next append (a limit that is
reached, a stream that is gone or was replaced) must show all the same. What a question cannot show (a disk that is
full) the agents notice, and their beats tell (log_keeper.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from events.nats_connection import Connection, Unanswered
from events.nats_streams import ApiError, api_once
from events.subjects import EVENT_STREAM


class StreamProbe:
    """`trouble`: by the last `look`, in one line; "" where nothing is wrong.

    `is_settled`: it is the stream that refuses, by its own configuration or state; no restart of a server helps.
    """

    def __init__(self, connection: Connection, folded_seq: Callable[[], int]) -> None:
        """`folded_seq`: the last entry that was read."""
        self._connection = connection
        self._folded_seq = folded_seq
        self.trouble = ""
        self.is_settled = False

    async def look(self) -> None:
        """One question, answered within seconds or not."""
        folded_seq = self._folded_seq()
        try:
            info = await api_once(self._connection, f"STREAM.INFO.{EVENT_STREAM}", {})
        except Unanswered as error:
            self.trouble, self.is_settled = f"NATS does not answer about the event log: {error}", False
        except ApiError as error:
            self.trouble = f"NATS has no event log: {error}"
            self.is_settled = not error.is_passing
        else:
            self.trouble = refusal(info, folded_seq)
            self.is_settled = bool(self.trouble)


def refusal(info: dict[str, Any], folded_seq: int) -> str:
    """Why the stream of this STREAM.INFO takes no append, or not ours; "" where it does."""
    config, state = info["config"], info["state"]
    if state["last_seq"] < folded_seq:
        return (
            f"stream {EVENT_STREAM} ends at entry {state['last_seq']}, and the coordinator has read {folded_seq}: the "
            "stream was recreated, or restored from an older backup"
        )
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
