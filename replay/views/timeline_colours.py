"""The colours of a timeline, the same in every drawing."""

from __future__ import annotations

from replay.views.timeline import IDLE, ISOLATED, LEFT, LOST, REGROUPING, TRAINING, WAITING, Span, Timeline

#: Okabe and Ito's palette, told apart by most colour-blind people.
PALETTE = ("#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#F0E442", "#8C6D31", "#637939")
COLOURS = {
    LOST: "#B22222",
    LEFT: "#FFFFFF",
    ISOLATED: "#D55E00",
    IDLE: "#DDDDDD",
    REGROUPING: "#F4B183",
    WAITING: "#EEEEEE",
}
SEVERITY_COLOURS = {1: "#B22222", 2: "#D55E00", 3: "#999999"}


def task_colours(timeline: Timeline) -> dict[str, str]:
    """A colour for each task, the same in every drawing."""
    return {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(timeline.tasks)}


def node_colour(span: Span, colours: dict[str, str]) -> str:
    """A node's: that of its task, grey for several."""
    if span.what in COLOURS:
        return COLOURS[span.what]
    return colours.get(span.tasks[0], "#666666") if len(span.tasks) == 1 else "#666666"


def task_colour(span: Span, own: str) -> str:
    """A task's: its own where it trains."""
    return own if span.what == TRAINING else COLOURS.get(span.what, "#FFFFFF")
