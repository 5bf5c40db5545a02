"""What the workers' flight recorders and marks say, as tables: which rank is behind, and in what it waits. Pure.

`collectives` are `unicrond.events.queries.worker_queries.Collective`, `marks`
`unicrond.events.queries.worker_queries.WorkerMark`, as the API's JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unicrond.display.tables import Table

#: Of those that have ended; those that have not are all shown.
ENDED_SHOWN = 5


def collectives_table(collectives: Sequence[Mapping[str, Any]]) -> Table:
    """The last ones of a worker, the newest last."""
    ended = [one for one in collectives if one["is_over"]]
    hidden = {id(one) for one in ended[:-ENDED_SHOWN]}
    rows = [
        (
            f"{one['library']} {one['group']}",
            f"p2p {one['number']}" if one["is_p2p"] else str(one["number"]),
            one["name"],
            one["sizes"],
            "ended" if one["is_over"] else one["state"],
            _span(one["since_us"]),
        )
        for one in collectives
        if id(one) not in hidden
    ]
    return Table(("group", "number", "collective", "input", "state", "begun before"), tuple(rows))


def ranks_table(ranks: Sequence[Mapping[str, Any]], marks: Mapping[str, Mapping[str, Any]]) -> Table:
    """All ranks side by side. `ranks`: rank, worker, node, collectives of each."""
    rows = []
    for told in ranks:
        mark = marks.get(told["worker"])
        open_ones = [one for one in told["collectives"] if not one["is_over"]]
        last = (open_ones or told["collectives"] or [None])[-1]
        where = f"{mark['phase']}, iteration {mark['iteration']}" if mark else "not known"
        entered = str(mark["entered"]) if mark else ""
        waits = f"for {_span(mark['still_us'])}" if mark and mark["waiting"] else "no" if mark else ""
        what = f"{last['name']} {last['sizes']}" if last else ""
        rows.append((str(told["rank"]), told["worker"], told["node"], where, entered, waits, what))
    return Table(("rank", "worker", "node", "where", "entered", "waits", "last collective"), tuple(rows))


def behind(ranks: Sequence[Mapping[str, Any]], marks: Mapping[str, Mapping[str, Any]]) -> str:
    """One sentence about the ranks that others wait for; "" where none does. Members of one generation enter the same
    collectives in the same order, so the one that has entered the fewest is behind."""
    known = [(told, marks[told["worker"]]) for told in ranks if told["worker"] in marks]
    newest = max((mark["generation"] for _, mark in known), default=0)
    known = [(told, mark) for told, mark in known if mark["generation"] == newest]
    if not any(mark["waiting"] for _, mark in known):
        return ""
    most, least = (pick(mark["entered"] for _, mark in known) for pick in (max, min))
    if least == most:
        return ""
    late = [(told, mark) for told, mark in known if mark["entered"] == least]
    names = ", ".join(f"rank {told['rank']} ({told['worker']} on {told['node']})" for told, _ in late[:6])
    more = f" and {len(late) - 6} more" if len(late) > 6 else ""
    return f"behind: {names}{more}: {least} collectives entered, others {most}"


def _span(micros: int) -> str:
    seconds = micros / 1e6
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
