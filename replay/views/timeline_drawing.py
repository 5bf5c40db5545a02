"""A timeline as one HTML page with an inline SVG (no script, no font, no picture from anywhere), and as a PNG."""

from __future__ import annotations

from html import escape
from pathlib import Path

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

#: Okabe and Ito's palette, told apart by most colour-blind people.
PALETTE = ("#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#F0E442", "#8C6D31", "#637939")
COLOURS = {
    NODE_LOST: "#B22222",
    NODE_LEFT: "#FFFFFF",
    NODE_ISOLATED: "#D55E00",
    NODE_IDLE: "#DDDDDD",
    REGROUPING: "#F4B183",
    WAITING: "#EEEEEE",
}
SEVERITY_COLOURS = {1: "#B22222", 2: "#D55E00", 3: "#999999"}


def task_colours(timeline: Timeline) -> dict[str, str]:
    """Return a colour for each task, the same in every drawing."""
    return {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(timeline.tasks)}


def node_colour(span: TimelineSpan, colours: dict[str, str]) -> str:
    """Return a node's colour: that of its task, grey for several."""
    if span.what in COLOURS:
        return COLOURS[span.what]
    return colours.get(span.tasks[0], "#666666") if len(span.tasks) == 1 else "#666666"


def task_colour(span: TimelineSpan, colour: str) -> str:
    """Return a task's colour: `colour` where it trains."""
    return colour if span.what == TRAINING else COLOURS.get(span.what, "#FFFFFF")


_LABEL, _PLOT, _ROW, _GAP, _WAF = 150, 1000, 18, 6, 120


def html_page(timeline: Timeline, title: str) -> str:
    """Return the whole page. A pointer over a span or an incident shows its times."""
    drawing = _Drawing(timeline)
    for name, spans in timeline.nodes.items():
        drawing.row(f"node {name}", [(span, node_colour(span, drawing.colours)) for span in spans])
    drawing.space()
    for name, spans in timeline.tasks.items():
        drawing.row(f"task {name}", [(span, task_colour(span, drawing.colours[name])) for span in spans])
    drawing.space()
    drawing.incidents()
    drawing.waf()
    legend = {**{f"task {name}": colour for name, colour in drawing.colours.items()}, **COLOURS}
    boxes = "".join(
        f'<span class="key"><span class="box" style="background:{colour}"></span>{escape(name)}</span>'
        for name, colour in legend.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{escape(title)}</title>
<style>
body {{ font: 14px sans-serif; margin: 2em; color: #222; }}
text {{ font: 12px sans-serif; fill: #222; }}
.key {{ margin-right: 1.2em; white-space: nowrap; }}
.box {{ display: inline-block; width: 1em; height: 1em; margin-right: .4em; border: 1px solid #999; }}
</style></head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(format_time(timeline.start_us))} to {escape(format_time(timeline.end_us))}, {timeline.state.seq} entries,
{len(timeline.incidents)} incidents. Point at anything for its times.</p>
<p>{boxes}</p>
{drawing.svg()}
</body>
</html>
"""


class _Drawing:
    """The SVG, from top to bottom."""

    def __init__(self, timeline: Timeline) -> None:
        self.colours = task_colours(timeline)
        self._timeline = timeline
        self._length = max(1, timeline.end_us - timeline.start_us)
        self._parts: list[str] = []
        self._y = 4

    def row(self, label: str, spans: list[tuple[TimelineSpan, str]]) -> None:
        """Draw one bar of spans."""
        self._label(label)
        for span, colour in spans:
            if span.what == NODE_LEFT:
                continue
            caption = f"{span.what}{f', {span.workers} workers' if span.workers else ''}"
            times = f"{self._since(span.start_us)} to {self._since(span.end_us)}"
            self._parts.append(
                f'<rect x="{self._x(span.start_us):.2f}" y="{self._y}" height="{_ROW}"'
                f' width="{max(0.4, self._x(span.end_us) - self._x(span.start_us)):.2f}" fill="{colour}">'
                f"<title>{escape(label)}: {escape(caption)}, {times}</title></rect>"
            )
        self._y += _ROW + _GAP

    def space(self) -> None:
        """Leave a space between groups of rows."""
        self._y += 2 * _GAP

    def incidents(self) -> None:
        """Draw each incident from its detection to its cure, on one row."""
        self._label("incidents")
        for incident in self._timeline.incidents:
            end_us = incident.resumed_us or incident.closed_us or self._timeline.end_us
            x = self._x(incident.detected_us)
            place = incident.worker or incident.node or incident.location
            caption = f"{incident.id} {incident.kind} SEV{incident.severity.value} {place}"
            self._parts.append(
                f'<rect x="{x:.2f}" y="{self._y}" height="{_ROW}" width="{max(2.0, self._x(end_us) - x):.2f}"'
                f' fill="{SEVERITY_COLOURS[incident.severity.value]}"><title>{escape(caption)}:'
                f" {self._since(incident.detected_us)} to {self._since(end_us)}</title></rect>"
            )
        self._y += _ROW + _GAP

    def waf(self) -> None:
        """Draw planned (thin) and running (filled) WAF over time."""
        self._space_for_waf()
        most = max((max(point.planned, point.running) for point in self._timeline.waf), default=0) or 1
        bottom = self._y + _WAF
        for kind, style in (
            ("running", 'fill="#0072B2" fill-opacity="0.35"'),
            ("planned", 'fill="none" stroke="#222"'),
        ):
            path, y = [f"M {_LABEL} {bottom}"], float(bottom)
            for point in self._timeline.waf:
                x = self._x(point.at_us)
                path.append(f"L {x:.2f} {y:.2f}")
                y = bottom - _WAF * getattr(point, kind) / most
                path.append(f"L {x:.2f} {y:.2f}")
            path.append(f"L {_LABEL + _PLOT} {y:.2f}")
            if kind == "running":
                path.append(f"L {_LABEL + _PLOT} {bottom} Z")
            self._parts.append(
                f'<path d="{" ".join(path)}" {style}><title>{kind} WAF, at most {most:.3g}</title></path>'
            )
        self._parts.append(f'<text x="0" y="{self._y + 24}">planned, running</text>')
        self._parts.append(f'<text x="0" y="{self._y + 38}">top {most:.3g} FLOP/s</text>')
        self._y = bottom + _GAP

    def svg(self) -> str:
        """Return the drawing with its time axis."""
        for since_us in ticks_us(self._length):
            at_us = self._timeline.start_us + since_us
            x = self._x(at_us)
            self._parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{self._y}" stroke="#BBB" stroke-width="0.5"/>'
            )
            self._parts.append(f'<text x="{x:.1f}" y="{self._y + 14}" text-anchor="middle">{self._since(at_us)}</text>')
        height = self._y + 24
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LABEL + _PLOT + 40} {height}"'
            f' width="100%" role="img">{"".join(self._parts)}</svg>'
        )

    def _space_for_waf(self) -> None:
        self._y += _GAP
        self._parts.append(f'<text x="0" y="{self._y + 10}">WAF</text>')

    def _label(self, text: str) -> None:
        self._parts.append(f'<text x="0" y="{self._y + 13}">{escape(text)}</text>')

    def _x(self, at_us: int) -> float:
        share = (at_us - self._timeline.start_us) / self._length
        return _LABEL + _PLOT * min(max(share, 0.0), 1.0)

    def _since(self, at_us: int) -> str:
        return f"{(at_us - self._timeline.start_us) / 1e6:.6g} s"


def ticks_us(length_us: int) -> list[int]:
    """Return round times along an axis: 1, 2 or 5 times a power of ten apart, four to eleven of them."""
    step_us = next(
        factor * 10**power for power in range(20) for factor in (1, 2, 5) if factor * 10**power * 10 >= length_us
    )
    return list(range(0, length_us + 1, step_us))


def write_png(timeline: Timeline, path: Path, title: str) -> None:
    """Draw the timeline into a file. Raises ImportError without matplotlib, OSError where it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = task_colours(timeline)
    rows: list[tuple[str, list[tuple[TimelineSpan, str]]]] = [
        (f"node {name}", [(span, node_colour(span, colours)) for span in spans])
        for name, spans in timeline.nodes.items()
    ]
    rows += [
        (f"task {name}", [(span, task_colour(span, colours[name])) for span in spans])
        for name, spans in timeline.tasks.items()
    ]
    figure, (bars, curve) = pyplot.subplots(
        2, 1, sharex=True, figsize=(12, 2.5 + 0.3 * len(rows)), height_ratios=[max(2, len(rows)), 3]
    )
    for y, (_, spans) in enumerate(rows):
        for span, colour in spans:
            if span.what != NODE_LEFT:
                length_s = (span.end_us - span.start_us) / 1e6
                bars.barh(y, length_s, left=_seconds(timeline, span.start_us), color=colour, height=0.8)
    for incident in timeline.incidents:
        colour = SEVERITY_COLOURS[incident.severity.value]
        bars.axvline(_seconds(timeline, incident.detected_us), color=colour, linewidth=0.8)
    bars.set_yticks(range(len(rows)), [label for label, _ in rows])
    bars.invert_yaxis()
    bars.set_title(title)
    times = [_seconds(timeline, point.at_us) for point in timeline.waf] + [_seconds(timeline, timeline.end_us)]
    for kind, style in (("planned", "-"), ("running", "--")) if timeline.waf else ():
        values = [getattr(point, kind) for point in timeline.waf]
        curve.step(times, [*values, *values[-1:]], style, where="post", label=kind)
    curve.set_ylabel("WAF, FLOP/s")
    curve.set_xlabel(f"seconds since {format_time(timeline.start_us)}")
    if timeline.waf:
        curve.legend(loc="lower right")
    legend = [*colours.items(), *((name, COLOURS[name]) for name in COLOURS if name != NODE_LEFT)]
    keys = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for _, colour in legend]
    bars.legend(keys, [name for name, _ in legend], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def _seconds(timeline: Timeline, at_us: int) -> float:
    return (at_us - timeline.start_us) / 1e6
