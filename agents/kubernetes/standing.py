"""Finds out whether this cluster has isolated the node, by the coordinator's own events in the log.

It reads the last NodeIsolated, NodeReadmitted and NodeForgotten of the node, which only the coordinator writes
(events/trust/logins.py); the latest counts. Where none is in the stream any more, nothing is known.
"""

from __future__ import annotations

from typing import NamedTuple

from unicrond.events.log.subjects import EVENT_STREAM, standing_subjects
from unicrond.events.nats.connection import Connection
from unicrond.events.vocabulary import Name, NodeIsolated
from unicrond.events.wire.codec import BadEvent, decode


class Standing(NamedTuple):
    """The node's standing. `isolated`: None where the log does not say."""

    isolated: bool | None
    reason: str


async def standing(connection: Connection, node: Name) -> Standing:
    """Return the node's standing by the log. Raise NoReply (PublishDenied)."""
    last, latest = 0, Standing(None, "")
    for subject in standing_subjects(node):
        answer = await connection.request(f"$JS.API.DIRECT.GET.{EVENT_STREAM}.{subject}", b"")
        seq = int((answer.headers or {}).get("Nats-Sequence", 0))
        if not answer.data or seq <= last:
            continue
        try:
            event = decode(answer.data).event
        except BadEvent:
            continue
        is_isolated = isinstance(event, NodeIsolated)
        last, latest = seq, Standing(is_isolated, event.reason if is_isolated else "")  # type: ignore[union-attr]  # tested just above
    return latest
