"""The workers' flight recorders and progress marks as tables: which rank is behind, and in which collective it waits.
Pure.

`collectives` are `unicrond.events.queries.worker_queries.Collective`, `marks`
`unicrond.events.queries.worker_queries.WorkerMark`, as the API's JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unicrond.display.tables import Table

#: How many collectives that have ended are shown; open ones are all shown.
ENDED_SHOWN = 5


def collectives_table(collectives: Sequence[Mapping[str, Any]]) -> Table:
    """Build a table of a worker's last collectives, the newest last."""
    ended = [collective for collective in collectives if collective["is_over"]]
    omitted = {id(collective) for collective in ended[:-ENDED_SHOWN]}
    rows = [
        (
            f"{collective['library']} {collective['group']}",
            f"p2p {collective['number']}" if collective["is_p2p"] else str(collective["number"]),
            collective["name"],
            collective["sizes"],
            "ended" if collective["is_over"] else collective["state"],
            _span(collective["since_us"]),
        )
        for collective in collectives
        if id(collective) not in omitted
    ]
    return Table(("group", "number", "collective", "input", "state", "begun before"), tuple(rows))


def ranks_table(ranks: Sequence[Mapping[str, Any]], marks: Mapping[str, Mapping[str, Any]]) -> Table:
    """Build a table of all ranks side by side. `ranks`: rank, worker, node and collectives of each."""
    rows = []
    for rank in ranks:
        mark = marks.get(rank["worker"])
        open_ones = [collective for collective in rank["collectives"] if not collective["is_over"]]
        last = (open_ones or rank["collectives"] or [None])[-1]
        position = f"{mark['phase']}, iteration {mark['iteration']}" if mark else "not known"
        if mark and mark.get("section"):
            position += f", section {mark['section']} for {_span(mark['section_us'])}"
        entered = str(mark["collectives_entered"]) if mark else ""
        waits = f"for {_span(mark['still_us'])}" if mark and mark["is_waiting"] else "no" if mark else ""
        name = f"{last['name']} {last['sizes']}" if last else ""
        rows.append((str(rank["rank"]), rank["worker"], rank["node"], position, entered, waits, name))
    return Table(("rank", "worker", "node", "where", "entered", "waits", "last collective"), tuple(rows))


def behind(ranks: Sequence[Mapping[str, Any]], marks: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe in one sentence the ranks that others wait for; "" where none does. Members of one generation enter the
    same collectives in the same order, so the one that has entered the fewest is behind."""
    marked = [(rank, marks[rank["worker"]]) for rank in ranks if rank["worker"] in marks]
    newest = max((mark["generation"] for _, mark in marked), default=0)
    marked = [(rank, mark) for rank, mark in marked if mark["generation"] == newest]
    if not any(mark["is_waiting"] for _, mark in marked):
        return ""
    most, least = (pick(mark["collectives_entered"] for _, mark in marked) for pick in (max, min))
    if least == most:
        return ""
    laggards = [(rank, mark) for rank, mark in marked if mark["collectives_entered"] == least]
    names = ", ".join(f"rank {rank['rank']} ({rank['worker']} on {rank['node']})" for rank, _ in laggards[:6])
    more = f" and {len(laggards) - 6} more" if len(laggards) > 6 else ""
    return f"behind: {names}{more}: {least} collectives entered, others {most}"


def _span(micros: int) -> str:
    seconds = micros / 1e6
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
