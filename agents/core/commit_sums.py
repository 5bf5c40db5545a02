"""Adds up reports of committed iterations, so that one StepCommitted stands for several. Pure; one task and one worker
at a time.

A sum covers consecutive iterations of one generation as one worker reported them; a commit that does not continue
it starts a new one.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec

from unicrond.agents.protocol.messages import IterationCommitted
from unicrond.agents.protocol.sampling import DIGEST_MODULUS
from unicrond.events.vocabulary import Checksums, Name, StepCommitted, WorkerId

#: (generation, iteration) of a commit: grows with every commit of a task, also after a return to a checkpoint.
Position: TypeAlias = tuple[int, int]


class CommitSum(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of iterations first..last of one generation; fields as in StepCommitted."""

    worker: WorkerId
    generation: int
    first: int
    last: int
    samples: int
    samples_digest: int
    loss: float
    duration_us: int
    micro_batches_by_rank: tuple[int, ...]
    micro_batches_repeated: int
    checksums: Checksums | None = None
    not_plain: int = 0
    not_plain_us: int = 0

    def event(self, node: Name, task: Name) -> StepCommitted:
        """Return the observation that stands for the whole sum."""
        return StepCommitted(node=node, task=task, **msgspec.structs.asdict(self))


def position(commit: IterationCommitted) -> Position:
    """Return the position of the commit among all commits of its task."""
    return (commit.generation, commit.iteration)


def urgent(commit: IterationCommitted) -> bool:
    """Return whether the commit must be reported at once: its loss is not finite."""
    return not math.isfinite(commit.loss)


def continues(before: CommitSum, worker: WorkerId, commit: IterationCommitted) -> bool:
    """Return whether the commit is the next one of the same sum."""
    return (
        before.worker == worker
        and before.generation == commit.generation
        and before.last + 1 == commit.iteration
        and len(before.micro_batches_by_rank) == len(commit.micro_batches_by_rank)
    )


def add(before: CommitSum | None, worker: WorkerId, commit: IterationCommitted) -> CommitSum:
    """Return the sum with one more commit; `before` is None or is continued by it."""
    if before is None:
        return CommitSum(
            worker=worker,
            generation=commit.generation,
            first=commit.iteration,
            last=commit.iteration,
            samples=commit.samples,
            samples_digest=commit.samples_digest % DIGEST_MODULUS,
            loss=commit.loss,
            duration_us=commit.duration_us,
            micro_batches_by_rank=commit.micro_batches_by_rank,
            micro_batches_repeated=commit.micro_batches_repeated,
            checksums=commit.checksums,
            not_plain=int(not commit.is_plain),
            not_plain_us=0 if commit.is_plain else commit.duration_us,
        )
    return CommitSum(
        worker=worker,
        generation=before.generation,
        first=before.first,
        last=commit.iteration,
        samples=before.samples + commit.samples,
        samples_digest=(before.samples_digest + commit.samples_digest) % DIGEST_MODULUS,
        loss=commit.loss,
        duration_us=before.duration_us + commit.duration_us,
        micro_batches_by_rank=tuple(
            a + b for a, b in zip(before.micro_batches_by_rank, commit.micro_batches_by_rank, strict=True)
        ),
        micro_batches_repeated=before.micro_batches_repeated + commit.micro_batches_repeated,
        checksums=commit.checksums or before.checksums,
        not_plain=before.not_plain + (not commit.is_plain),
        not_plain_us=before.not_plain_us + (0 if commit.is_plain else commit.duration_us),
    )
