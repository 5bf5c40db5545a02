"""The past, by the events that the API gives: points of the log, and the state there, by the coordinator's own fold.

The whole log up to the point is read and folded here: about 20,000 entries a second. What the API hides (secrets) is
hidden in that state as well, so it has no digest to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import TypeAlias

from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState
from unicrond.ctl.client import Client
from unicrond.display.event_lines import EventLine
from unicrond.events.cli.command_line import UsageError
from unicrond.events.log.point import AtSeq, BeforeEnd, Point
from unicrond.events.wire.envelope import Entry

PointArgument: TypeAlias = Point | BeforeEnd
#: The first piece that is looked through for the last events of a kind; each next one is larger.
_PIECE = 500


def end_of(client: Client) -> int:
    """Return the last entry that the coordinator has folded."""
    return int(client.health()["seq"])


def point_in(client: Client, at: PointArgument, end: int) -> Point:
    """Resolve the point, where it was given as a span before the end."""
    if not isinstance(at, BeforeEnd):
        return at
    return at.resolve(_entry(client, end).recorded_at_us if end else 0)


def state_at(client: Client, at: PointArgument) -> ClusterState:
    """Return the state after all entries that the point covers. Raises UsageError beyond the log's end."""
    from unicrond.core.replayer import replay  # brings asyncio with it

    return replay(_entries(client, at))


def moment_at(client: Client, at: PointArgument) -> tuple[ClusterState, Policy]:
    """Return the state at the point, and the policy of the coordinator of that moment.

    Raises UsageError beyond the log's end, and where this version cannot read the policy.
    """
    from unicrond.views.view import PolicyView, feed_all

    policies = PolicyView()
    try:
        state = feed_all(policies, _entries(client, at))
    except ValueError as error:
        raise UsageError(f"--at: {error}") from None
    return state, policies.policy


def _entries(client: Client, at: PointArgument) -> Iterator[Entry]:
    """Yield all entries that the point covers. Raises UsageError beyond the log's end."""
    end = end_of(client)
    point = point_in(client, at, end)
    if isinstance(point, AtSeq) and point.seq > end:
        raise UsageError(f"--at: entry {point.seq} is not in the log, which ends at entry {end}")
    return takewhile(point.covers, client.entries(0, point.seq if isinstance(point, AtSeq) else end))


def seq_at(client: Client, at: PointArgument, end: int) -> int:
    """Return the last entry that the point covers, 0 for none: by halves, since entries lie in the order of their
    times."""
    point = point_in(client, at, end)
    if isinstance(point, AtSeq):
        return min(point.seq, end)
    low, high = 0, end
    while low < high:
        middle = (low + high + 1) // 2
        if _entry(client, middle).recorded_at_us <= point.time_us:
            low = middle
        else:
            high = middle - 1
    return low


def last_of(client: Client, count: int, after: int, until: int, takes: Callable[[EventLine], bool]) -> list[EventLine]:
    """Return the last `count` entries from `after` + 1 to `until` that are wanted, in order; read from the end
    backwards."""
    lines: list[EventLine] = []
    piece = max(_PIECE, count)
    while until > after and len(lines) < count:
        begin = max(after, until - piece)
        lines = [line for line in client.events(begin, until=until) if takes(line)] + lines
        until, piece = begin, piece * 4
    return lines[-count:]


def _entry(client: Client, seq: int) -> EventLine:
    return next(iter(client.events(seq - 1, until=seq)))
