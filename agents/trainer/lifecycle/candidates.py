"""The states that a group without any could load, as rows that the members gather, and the order in which it tries
them.

Rules
-----
* The newest iteration first: nothing is trained again that any member can still find. Of the same iteration the
  nearest: memory here, memory of another node, storage. (What is nearer is saved to more often, so it is newer as well,
  unless it was left behind by a task that has moved away since.)
* Where storage does not say what it has, a state in memory is taken that is at least as new as the newest checkpoint
  that the head or member 0's processes know of. Before an older one is taken, or where they do not know, storage must
  be seen, however long that takes.
* All members gather all rows, so that all know the candidates in the same order.

Pure. How candidates are found and taken: `sources.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal["memory", "peer", "checkpoint"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: How many iterations of each kind a member offers, the newest first.
OFFERS_MAX: dict[Kind, int] = {"memory": 2, "peer": 4, "checkpoint": 4}
ROW_WORDS = sum(OFFERS_MAX.values())
#: Of storage that was not seen: what it has is not known, and no state may be loaded before it is.
UNKNOWN = 1 << 62


@dataclass(frozen=True, slots=True)
class Candidate:
    """A state after `iteration`, which the replica of member `rank` can load from `kind`."""

    iteration: int
    kind: Kind
    rank: int

    def __str__(self) -> str:
        return f"{self.kind} of iteration {self.iteration}"


def ordered(rows: Sequence[Sequence[int]]) -> list[Candidate]:
    """Return all candidates that the gathered rows name, best first. `rows[m]`: member m's iterations by kind, 0 for
    none."""
    candidates = [
        Candidate(iteration, kind, rank)
        for rank, row in enumerate(rows)
        for kind, iterations in split(row).items()
        for iteration in iterations
    ]
    return sorted(
        dict.fromkeys(candidates),
        key=lambda candidate: (-candidate.iteration, KINDS.index(candidate.kind), candidate.rank),
    )


def newest(rows: Sequence[Sequence[int]], kind: Kind) -> int:
    """Return the newest iteration of the kind that anybody named; 0 for none."""
    return max((iteration for row in rows for iteration in split(row)[kind]), default=0)


def row_of(offers: dict[Kind, list[int]]) -> list[int]:
    """Return the row that a member gathers."""
    row: list[int] = []
    for kind in KINDS:
        iterations = sorted(offers.get(kind, []), reverse=True)[: OFFERS_MAX[kind]]
        row += iterations + [0] * (OFFERS_MAX[kind] - len(iterations))
    return row


def without_storage(row: Sequence[int], checkpoint: int) -> list[int]:
    """Return the row of a worker that could not look at storage, and knows of none newer than `checkpoint`."""
    return [*row[:-1], -1 - checkpoint]


def is_storage_seen(rows: Sequence[Sequence[int]]) -> bool:
    """Return whether the rows have what storage has, as far as anybody was to look there."""
    return oldest_allowed(rows) == 0


def oldest_allowed(rows: Sequence[Sequence[int]]) -> int:
    """Return the iteration of the newest checkpoint that is known, at least 1: no older state may be loaded until
    storage is seen. 0: it has been seen."""
    return max((max(1, -1 - row[-1]) for row in rows if row[-1] < 0), default=0)


def split(row: Sequence[int]) -> dict[Kind, list[int]]:
    """Return the iterations of a row by kind; the inverse of `row_of`."""
    offers: dict[Kind, list[int]] = {}
    start = 0
    for kind in KINDS:
        offers[kind] = [iteration for iteration in row[start : start + OFFERS_MAX[kind]] if iteration > 0]
        start += OFFERS_MAX[kind]
    return offers
