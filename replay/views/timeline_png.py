"""A timeline as a PNG, by matplotlib (extra `plot`)."""

from __future__ import annotations

from pathlib import Path

from unicrond.events.vocabulary.phrases import format_time
from unicrond.replay.views.timeline import NODE_LEFT, Timeline, TimelineSpan
from unicrond.replay.views.timeline_colours import COLOURS, SEVERITY_COLOURS, node_colour, task_colour, task_colours


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
