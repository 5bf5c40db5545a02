"""The colours of a timeline, the same in every drawing."""

from __future__ import annotations

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
