"""Runs: many workers on one node in a few bytes (events/vocabulary/placements.py)."""

from __future__ import annotations

from collections.abc import Iterable

from unicrond.events.vocabulary.base import Value
from unicrond.events.vocabulary.field_types import Count, Name, Serial, Slots


class SeatRun(Value, frozen=True, kw_only=True, array_like=True):
    """A run of `count` members of a task on one node, with consecutive numbers at consecutive seats
    (events/vocabulary/placements.py).

    `number`, `seat`: of the first one. `joins`: they are joiners. On the wire a bare array: it gets no further field.
    """

    node: Name
    number: Serial
    seat: Count
    count: Slots
    joins: bool


class NodeRun(Value, frozen=True, kw_only=True, array_like=True):
    """The next `count` workers of a plan run on `node`. On the wire a bare array: it gets no further field."""

    node: Name
    count: Slots


def workers_in(runs: Iterable[SeatRun | NodeRun]) -> int:
    """Count the workers that the runs hold."""
    return sum([run.count for run in runs])
