"""A timeline for the terminal: one row per node and task, one column per slice of time. Pure."""

from __future__ import annotations

import string
from collections.abc import Sequence

from unicrond.events.vocabulary.phrases import format_time
from unicrond.replay.views.timeline import (
    NODE_IDLE,
    NODE_ISOLATED,
    NODE_LEFT,
    NODE_LOST,
    REGROUPING,
    TRAINING,
    WAITING,
    Timeline,
    TimelineSpan,
)

_NODE_SIGNS = {NODE_LOST: "x", NODE_LEFT: " ", NODE_ISOLATED: "!", NODE_IDLE: "."}
_BARS = " ▁▂▃▄▅▆▇█"


def text_page(timeline: Timeline, width: int = 100) -> str:
    """Return rows of at most `width` characters, and what the signs mean."""
    label = max([len(name) for name in (*timeline.nodes, *timeline.tasks)] + [len("incidents")]) + 2
    columns = max(10, width - label)
    letters = dict(zip(timeline.tasks, string.ascii_uppercase + string.ascii_lowercase, strict=False))
    starts = _slices(timeline, columns)
    lines = [f"{format_time(timeline.start_us)} to {format_time(timeline.end_us)}", ""]
    for name, spans in timeline.nodes.items():
        lines.append(name.ljust(label) + "".join(_node_sign(_at(spans, at_us), letters) for at_us in starts))
    lines.append("")
    for name, spans in timeline.tasks.items():
        lines.append(name.ljust(label) + "".join(_task_sign(_at(spans, at_us)) for at_us in starts))
    lines += ["", "incidents".ljust(label) + _incident_row(timeline, columns)]
    lines.append("WAF".ljust(label) + _waf_row(timeline, starts))
    legend = ", ".join(f"{letter} {name}" for name, letter in letters.items())
    lines += [
        "",
        f"nodes: {legend + ', ' if legend else ''}+ several tasks, . idle, x lost, ! isolated, blank: not there",
        "tasks: number of workers that train (# more than 9), r regrouping, - waiting, blank: not there or ended",
        "incidents: their severity, where they were detected; WAF: of the groups that train, full = "
        f"{_most(timeline):.3g} FLOP/s",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _slices(timeline: Timeline, columns: int) -> list[int]:
    """Return the middle of each column's slice of time."""
    length = max(1, timeline.end_us - timeline.start_us)
    return [timeline.start_us + (2 * number + 1) * length // (2 * columns) for number in range(columns)]


def _at(spans: Sequence[TimelineSpan], at_us: int) -> TimelineSpan | None:
    return next((span for span in reversed(spans) if span.start_us <= at_us), None)


def _node_sign(span: TimelineSpan | None, letters: dict[str, str]) -> str:
    if span is None:
        return " "
    if span.what in _NODE_SIGNS:
        return _NODE_SIGNS[span.what]
    return letters.get(span.tasks[0], "?") if len(span.tasks) == 1 else "+"


def _task_sign(span: TimelineSpan | None) -> str:
    if span is None:
        return " "
    if span.what == TRAINING:
        return str(span.workers) if span.workers <= 9 else "#"
    return {REGROUPING: "r", WAITING: "-"}.get(span.what, " ")


def _incident_row(timeline: Timeline, columns: int) -> str:
    row = [" "] * columns
    length = max(1, timeline.end_us - timeline.start_us)
    for incident in sorted(timeline.incidents, key=lambda entry: -entry.severity):
        column = (incident.detected_us - timeline.start_us) * columns // length
        row[min(max(column, 0), columns - 1)] = str(incident.severity.value)
    return "".join(row)


def _most(timeline: Timeline) -> int:
    return max((max(point.planned, point.running) for point in timeline.waf), default=0)


def _waf_row(timeline: Timeline, starts: Sequence[int]) -> str:
    most = _most(timeline)
    row = []
    for at_us in starts:
        point = next((candidate for candidate in reversed(timeline.waf) if candidate.at_us <= at_us), None)
        share = point.running / most if point and most else 0.0
        row.append(_BARS[round(share * (len(_BARS) - 1))])
    return "".join(row)
