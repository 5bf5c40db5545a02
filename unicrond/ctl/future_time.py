"""Times to come, as people give them: a span from now, or a time with its zone."""

from __future__ import annotations

from typing import Any

from unicrond.events.log.point import AtTime, BeforeEnd, Point, parse_point

MOMENT_SYNTAX = "a span from now (2h, 90m) or a time with its zone (2026-11-20T09:30:00Z)"
_SPAN_MAX_US = 366 * 86_400_000_000


def moment(text: str) -> BeforeEnd | AtTime:
    """Parse a future time, for argparse. Raises ValueError in one line."""
    text = text.removeprefix("@")  # command_line.py has put it before a span that looks like a flag
    point = _parsed(text)
    if isinstance(point, AtTime) or (isinstance(point, BeforeEnd) and _is_positive(text, point)):
        return point
    raise ValueError(f"{text!r} is no time to come; give {MOMENT_SYNTAX}")


def span_s(text: str) -> float:
    """Parse a duration in seconds, for argparse. Raises ValueError in one line."""
    text = text.removeprefix("@")  # command_line.py has put it before a span that looks like a flag
    span = _parsed(text)
    if isinstance(span, BeforeEnd) and _is_positive(text, span):
        return span.span_us / 1e6
    raise ValueError(f"{text!r} is no duration up to a year; give one like 90m, 2h or 3d")


def as_body(when: BeforeEnd | AtTime) -> dict[str, Any]:
    """Convert the time to the form of the API (service/api/api.py, `_When`): a span is counted by the coordinator's
    clock."""
    return {"at_us": when.time_us} if isinstance(when, AtTime) else {"in_s": when.span_us / 1e6}


def _parsed(text: str) -> Point | BeforeEnd | None:
    try:
        return parse_point(text)
    except ValueError:
        return None


def _is_positive(text: str, span: BeforeEnd) -> bool:
    return not text.startswith("-") and 0 < span.span_us <= _SPAN_MAX_US
