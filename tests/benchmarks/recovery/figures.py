"""From what the witnesses saw to figures: of each fault, of the steps between faults, and unicrond's budget by stage.

A fault's figures
-----------------
* `next_step_ms`: from the kill until the last of those that make the next optimizer step has made it.
* `full_step_ms`: the same for the next step whose gradients are of the full global batch.
* `new_step_ms`: the same for the next step that had not been made before the kill (torchrun goes back).
* `rolled_back`: steps that had been made and were lost.
* `again`: micro-batches computed that had been finished before by anybody, until the first new full step;
  `again_survivors`: those of them that a process had finished which the kill did not hit.
* `missing`: micro-batches that the steps up to the first full one lacked.
* `other_ms`: of `next_step_ms`, what was neither a micro-batch nor the optimizer's step, at the slowest rank: the
  one of those that made the step which ended its last micro-batch last. The others waited for it.

And, from the last step before the kill until all ranks train steadily again, with the usual iteration of the run:

* `lost_ms`: how much longer that lasted than its work (new steps, each in proportion to its global batch) usually does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.recovery.witness import Line

#: Stages of unicrond's budget, one after the other at the slowest rank. Together they last until that rank's own step;
#: `next_step_ms` ends when the last of all ranks has made it.
STAGES = ("detect", "log", "decide", "command", "stop", "regroup", "own", "redo", "reduce", "step")


class NotYet(Exception):
    """The traces do not show the whole recovery."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One fault's figures; times in milliseconds."""

    at_us: int
    iteration: int
    next_step_ms: float
    full_step_ms: float
    new_step_ms: float
    rolled_back: int
    again: int
    again_survivors: int
    missing: int
    other_ms: float
    slowest: str


def recovery(lines: Sequence[Line], killed: Line, full: int) -> Recovery:
    """The recovery from the kill in `killed`; `full`: micro-batches of the full global batch. Raises NotYet."""
    before, after = _parted(lines, killed)
    last = max((line.numbers[0] for line in before if line.word == "stepped"), default=0)
    steps = sorted(_steps(after), key=lambda step: step.at_us)
    if not steps:
        raise NotYet
    first = steps[0]
    whole = next((step for step in steps if step.micro_batches >= full), None)
    new = next((step for step in steps if step.iteration > last), None)
    end = next((step for step in steps if step.iteration > last and step.micro_batches >= full), None)
    if whole is None or new is None or end is None:
        raise NotYet
    again = again_survivors = 0
    finished: dict[tuple[int, ...], str] = {}
    for line in lines:
        if line.word != "computed" or line.numbers[0] < first.iteration or line.at_us > end.at_us:
            continue
        if line.at_us > killed.at_us and line.numbers in finished:
            again += 1
            again_survivors += finished[line.numbers] != killed.process
        finished.setdefault(line.numbers, line.process)
    return Recovery(
        at_us=killed.at_us,
        iteration=killed.numbers[0],
        next_step_ms=(first.at_us - killed.at_us) / 1e3,
        full_step_ms=(whole.at_us - killed.at_us) / 1e3,
        new_step_ms=(new.at_us - killed.at_us) / 1e3,
        rolled_back=last + 1 - first.iteration,
        again=again,
        again_survivors=again_survivors,
        missing=sum(full - step.micro_batches for step in steps if step.at_us <= whole.at_us),
        other_ms=_other_us(lines, killed.at_us, first) / 1e3,
        slowest=first.process,
    )


def _parted(lines: Sequence[Line], killed: Line) -> tuple[list[Line], list[Line]]:
    """What was before the kill and what after it. A rank that was late may make the step before the killed iteration
    after the kill: that step was made."""
    before = [line for line in lines if line.at_us < killed.at_us]
    old = {line.process for line in before}
    after = []
    for line in lines:
        if line.at_us > killed.at_us:
            late = line.word == "stepped" and line.numbers[0] < killed.numbers[0] and line.process in old
            (before if late else after).append(line)
    return before, after


@dataclass(frozen=True, slots=True)
class _Step:
    """A step as the last of its ranks made it. `process`: the slowest."""

    iteration: int
    micro_batches: int
    at_us: int
    process: str


def _steps(after: Sequence[Line]) -> list[_Step]:
    last: dict[int, Line] = {}
    slowest: dict[int, str] = {}
    makers = {(line.process, line.numbers[0]) for line in after if line.word == "stepped"}
    for line in after:
        if line.word == "stepped":
            last[line.numbers[0]] = line
        elif line.word == "computed" and (line.process, line.numbers[0]) in makers:
            slowest[line.numbers[0]] = line.process
    return [
        _Step(iteration, line.numbers[1], line.at_us, slowest.get(iteration, line.process))
        for iteration, line in last.items()
    ]


def _other_us(lines: Sequence[Line], killed_us: int, step: _Step) -> int:
    """What the slowest did between the kill and its own part in `step` besides computing."""
    process = [line for line in lines if line.process == step.process]
    made = ("stepped", step.iteration)
    ended_us = max(line.at_us for line in process if (line.word, *line.numbers[:1]) == made and line.at_us > killed_us)
    mine = [line for line in process if line.at_us <= ended_us]
    spans = _computing(mine)
    spans.extend((line.at_us, ended_us) for line in mine if line.word == "agreed" and line.at_us > killed_us)
    return ended_us - killed_us - sum(max(0, ended - max(begun, killed_us)) for begun, ended in spans)


def lost_ms(lines: Sequence[Line], killed: Line, until_us: int, full: int, usual_ms: float) -> float:
    """See the module's words; `until_us`: when all trained steadily."""
    before, after = _parted([line for line in lines if line.at_us <= until_us], killed)
    begun_us, last = max((step.at_us, step.iteration) for step in _steps(before))
    new = [step for step in _steps(after) if step.iteration > last]
    work = sum(step.micro_batches / full for step in new)
    return (max(step.at_us for step in new) - begun_us) / 1e3 - work * usual_ms


def steady_ms(lines: Sequence[Line], windows: Sequence[tuple[int, int]]) -> list[float]:
    """How long each iteration lasted, as each rank saw it, that lies wholly in one of the windows."""
    found = []
    for process in {line.process for line in lines}:
        steps = [line for line in lines if line.word == "stepped" and line.process == process]
        for before, after in itertools.pairwise(steps):
            if after.numbers[0] == before.numbers[0] + 1 and any(
                begun <= before.at_us and after.at_us <= ended for begun, ended in windows
            ):
                found.append((after.at_us - before.at_us) / 1e3)
    return found


def budget(lines: Sequence[Line], found: Recovery, logged: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Milliseconds by stage at the slowest survivor, and how many of them it computed (micro-batches and the
    optimizer's step). `logged`: when the agent had seen the worker's end ("detect"), the log held it ("log"), the
    coordinator had decided ("decide"), in microseconds of the wall clock. A stage that was over before its
    predecessor is 0.
    """
    process = [line for line in lines if line.process == found.slowest]
    hand = {line.numbers[1] for line in process if line.word == "computing" and line.numbers[0] == found.iteration - 1}
    mine = [line for line in process if line.at_us > found.at_us]
    step = next(line for line in mine if line.word == "stepped" and line.numbers[0] >= found.iteration)
    mine = [line for line in mine if line.at_us <= step.at_us]
    seated = [line for line in mine if line.word == "seated"][-1]
    agreed = [line for line in mine if line.word == "agreed"][-1]
    own = [line.at_us for line in mine if line.word == "computed" and line.numbers[1] in hand]
    repeated = [line.at_us for line in mine if line.word == "computed" and line.numbers[1] not in hand]
    ends = {
        **logged,
        "command": seated.numbers[1],
        "stop": next(line.at_us for line in mine if line.word == "leaving"),
        "regroup": seated.at_us,
        "own": max(own, default=0),
        "redo": max(repeated, default=0),
        "reduce": agreed.at_us,
        "step": step.at_us,
    }
    computing = [*_computing(process), (agreed.at_us, step.at_us)]
    stages, since_us = {}, found.at_us
    for stage in STAGES:
        until_us = max(since_us, ends[stage])
        spent_us = sum(max(0, min(until_us, ended) - max(since_us, begun)) for begun, ended in computing)
        stages[stage] = ((until_us - since_us) / 1e3, spent_us / 1e3)
        since_us = until_us
    return stages


def _computing(process: Sequence[Line]) -> list[tuple[int, int]]:
    """When one process computed micro-batches: from, until."""
    spans, begun = [], {}
    for line in process:
        if line.word == "computing":
            begun[line.numbers] = line.at_us
        elif line.word == "computed" and line.numbers in begun:
            spans.append((begun.pop(line.numbers), line.at_us))
    return spans
