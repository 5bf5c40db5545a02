"""Two runs of a task, step by step: where do they diverge, and what happened there? Pure.

Rules
-----
* Compared are the values that the log has of single iterations: the loss, the checksum of the sums of its
  gradients, that of the parameters after it. All are the same, bit by bit, in two runs of a task with fixed sums,
  whatever happened to either.
* They are compared in this order, which is that of cause and effect: sums that differ where the parameters before them
  are equal come from other samples, other kernels or broken hardware; parameters that differ after equal sums come
  from the optimizer.
* Of an iteration that was computed twice, after a return to a checkpoint, the later one counts.
* An equal loss says little; one that differs shows that something was different before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from unicrond.events.vocabulary import StepCommitted
from unicrond.events.wire.envelope import Entry, RecordedEvent


@dataclass(slots=True)
class RunHistory:
    """What a log holds of one run of a task. `losses`, `sums`, `parameters`: by iteration. `entries`: the log's entries
    about the task, each with the last iteration that was committed by then."""

    losses: dict[int, float] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    parameters: dict[int, int] = field(default_factory=dict)
    entries: list[tuple[int, Entry]] = field(default_factory=list)
    last: int = 0


class RunComparison(NamedTuple):
    """How far two runs of a task agree. `compared`: how many values both runs have. `same`: the last iteration up to
    which all of them agree. `differs`: the first one with another value, 0 for none, and what of it, with the two
    values."""

    compared: int
    same: int
    differs: int = 0
    what: str = ""
    values: tuple[float, float] = (0, 0)


def history_of(entries: Iterable[Entry], task: str) -> RunHistory:
    """Collect the task's history from the log's entries."""
    run = RunHistory()
    for entry in entries:
        follow(run, entry, task)
    return run


def follow(run: RunHistory, entry: Entry, task: str) -> None:
    """Add one more entry of the log to the run."""
    if not isinstance(entry, RecordedEvent):
        return
    event = entry.envelope.event
    if isinstance(event, StepCommitted):
        if event.task == task:
            run.losses[event.last] = event.loss
            checksums = event.checksums
            if checksums is not None and checksums.parameters:
                run.parameters[checksums.iteration] = checksums.parameters
            if checksums is not None and checksums.sums:
                run.sums[checksums.iteration + 1] = checksums.sums
            run.last = event.last
    elif getattr(event, "task", "") == task or task in getattr(event, "tasks", ()):
        run.entries.append((run.last, entry))


def compare_runs(first: RunHistory, second: RunHistory) -> RunComparison:
    """Compare the two runs iteration by iteration up to the first difference."""
    compared, equal_until = 0, 0
    values = (
        ("loss", first.losses, second.losses),
        ("gradient sums", first.sums, second.sums),
        ("parameters", first.parameters, second.parameters),
    )
    iterations = [{*first_values} & {*second_values} for _, first_values, second_values in values]
    for iteration in sorted(set[int]().union(*iterations)):
        for quantity, first_values, second_values in values:
            if iteration in first_values and iteration in second_values:
                compared += 1
                if first_values[iteration] != second_values[iteration]:
                    return RunComparison(
                        compared, equal_until, iteration, quantity, (first_values[iteration], second_values[iteration])
                    )
        equal_until = iteration
    return RunComparison(compared, equal_until)


def entries_between(run: RunHistory, comparison: RunComparison) -> list[Entry]:
    """Return the log's entries about the task between the last iteration that is equal and the first that differs."""
    return [entry for last, entry in run.entries if comparison.same <= last < max(comparison.differs, 1)]
