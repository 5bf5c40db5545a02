"""Counts, durations, times and suggestions in words, as several sentences share them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def count(number: int, singular: str, many: str | None = None) -> str:
    """Say how many there are, in words."""
    return f"{number} {singular if number == 1 else many or singular + 's'}"


def abridge(names: Sequence[str], limit: int = 8) -> str:
    """Name the first `limit` of them, and count the others."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def seconds(duration_us: int) -> str:
    """Say microseconds in seconds."""
    return f"{duration_us / 1e6:.3f} s"


def task_of(worker: str) -> str:
    """Return the task that a worker id names."""
    return worker.rpartition(".")[0]


def format_time(time_us: int) -> str:
    """Write microseconds since the epoch as RFC 3339 in UTC, or as the bare number where no calendar reaches."""
    try:
        time = EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return f"{time_us} us"
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def to_the_second(time_us: int) -> str:
    """Write the same without the fraction: for times that people have given."""
    text = format_time(time_us)
    return f"{text.partition('.')[0]}Z" if text.endswith("Z") else text


def span(duration_us: int) -> str:
    """Write a length of time in whole minutes, hours or days, rounded down: 90 min, 3 h, 2 days."""
    minutes = max(0, duration_us) // 60_000_000
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} days"


def guess(word: str, choices: Sequence[str], otherwise: str = "") -> str:
    """Suggest the choice that `word` was meant to be: "did you mean X?", or `otherwise`, by default the list to choose
    from."""
    matches = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean {matches[0]}?" if matches else otherwise or f"choose from {', '.join(choices)}"


def clean(text: str) -> str:
    """Return `text` on one line, without control characters."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(text.split())
