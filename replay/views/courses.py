"""Two runs of a task, step by step: where do they part, and what happened there? Pure.

Rules
-----
* What is compared is what the log says of single iterations: the loss of one, the checksum of the sums of its
  gradients, that of the parameters after it. All are the same, bit by bit, in two runs of a task with fixed sums,
  whatever happened to either.
* In this order, which is that of cause and effect: sums that differ where the parameters before them are equal come of
  other samples, of other kernels or of broken hardware; parameters that differ after equal sums come of the optimizer.
* Of an iteration that was made twice, after a return to a checkpoint, the later one counts.
* A loss that is equal says little; one that differs says that something was other before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from events.envelope import Entry, Recorded
from events.vocabulary import StepCommitted


@dataclass(slots=True)
class Course:
    """One run. `losses`, `sums`, `parameters`: by iteration. `told`: the log's entries about the task, each with the
    last iteration that was committed by then."""

    losses: dict[int, float] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    parameters: dict[int, int] = field(default_factory=dict)
    told: list[tuple[int, Entry]] = field(default_factory=list)
    last: int = 0


class Parting(NamedTuple):
    """`compared`: how many values both runs have. `same`: the last iteration up to which all of them agree.
    `differs`: the first one with another value, 0 for none, and what of it, with the two values."""

    compared: int
    same: int
    differs: int = 0
    what: str = ""
    values: tuple[float, float] = (0, 0)


def course(entries: Iterable[Entry], task: str) -> Course:
    """The task's, from the log's entries."""
    found = Course()
    for entry in entries:
        follow(found, entry, task)
    return found


def follow(run: Course, entry: Entry, task: str) -> None:
    """Take one more entry of the log."""
    if not isinstance(entry, Recorded):
        return
    event = entry.envelope.event
    if isinstance(event, StepCommitted):
        if event.task == task:
            run.losses[event.last] = event.loss
            made = event.checksums
            if made is not None and made.parameters:
                run.parameters[made.after] = made.parameters
            if made is not None and made.sums:
                run.sums[made.after + 1] = made.sums
            run.last = event.last
    elif getattr(event, "task", "") == task or task in getattr(event, "tasks", ()):
        run.told.append((run.last, entry))


def parting(one: Course, other: Course) -> Parting:
    """Where the two runs part."""
    compared, same = 0, 0
    values = (
        ("loss", one.losses, other.losses),
        ("gradient sums", one.sums, other.sums),
        ("parameters", one.parameters, other.parameters),
    )
    named = [{*mine} & {*theirs} for _, mine, theirs in values]
    for iteration in sorted(set[int]().union(*named)):
        for what, mine, theirs in values:
            if iteration in mine and iteration in theirs:
                compared += 1
                if mine[iteration] != theirs[iteration]:
                    return Parting(compared, same, iteration, what, (mine[iteration], theirs[iteration]))
        same = iteration
    return Parting(compared, same)


def between(run: Course, found: Parting) -> list[Entry]:
    """What the log tells of the task between the last iteration that is the same and the first that is not."""
    return [entry for last, entry in run.told if found.same <= last < max(found.differs, 1)]
