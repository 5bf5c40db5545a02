"""Phrases that several sentences share."""

from __future__ import annotations


def count(number: int, singular: str, many: str | None = None) -> str:
    """Say how many there are, in words."""
    return f"{number} {singular if number == 1 else many or singular + 's'}"


def seconds(duration_us: int) -> str:
    """Say microseconds in seconds."""
    return f"{duration_us / 1e6:.3f} s"


def task_of(worker: str) -> str:
    """Return the task that a worker id names."""
    return worker.rpartition(".")[0]
