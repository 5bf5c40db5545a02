"""Another tp and pp for a running task: what becomes of its description.

The way of a reshape: somebody asks (`ReshapeRequested`); the task is brought to the end of an iteration and hands its
state over; its workers end; it is described anew (`TaskReshaped`), planned for, and the first new workers put the
state together (decide.py). Where tp and pp stay, only the bounds change, and no member has to leave.
"""

from __future__ import annotations

from msgspec.structs import replace

from events.vocabulary import ReshapeRequested, TaskReshaped, TaskSpec


def is_in_place(spec: TaskSpec, asked: ReshapeRequested) -> bool:
    """The task's workers can stay: only their number is another."""
    return (spec.tp, spec.pp) == (asked.tp, asked.pp)


def changes_nothing(spec: TaskSpec, asked: ReshapeRequested) -> bool:
    """The task is what it is asked to be."""
    return reshaped(spec, asked) == spec


def reshaped(spec: TaskSpec, asked: ReshapeRequested | TaskReshaped) -> TaskSpec:
    """The task as it is from then on. Throughput that was given for more workers than it may have is left out."""
    known = {n: flops for n, flops in spec.throughput.items() if n.isdecimal() and int(n) <= asked.max_workers}
    return replace(
        spec,
        tp=asked.tp,
        pp=asked.pp,
        min_workers=asked.min_workers,
        max_workers=asked.max_workers,
        throughput=known,
    )
