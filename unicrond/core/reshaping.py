"""Another tp and pp for a running task, another end, another learning rate: what becomes of its description.

The way of a reshape: somebody asks (`ReshapeRequested`); the task is brought to the end of an iteration and hands its
state over; its workers end; it is described anew (`TaskReshaped`), planned for, and the first new workers put the
state together (decide.py). Where only the bounds change, no member has to leave: the rest a worker knows from its
birth.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from events import megatron_lm
from events.vocabulary import ReshapeRequested, TaskAssignment, TaskReshaped, TaskSpec
from unicrond.core.planning.placement import Shape


def layout_key(tp: int, pp: int) -> str:
    """The name of a layout in the state: "2x1"."""
    return f"{tp}x{pp}"


def shape_of(spec: TaskSpec) -> Shape:
    """The layout that the task has."""
    return Shape(spec.tp, spec.pp)


def planned_shape(spec: TaskSpec, assignment: TaskAssignment | None) -> Shape:
    """The layout that a plan gives the task: its own where the plan had no choice."""
    return Shape(assignment.tp, assignment.pp) if assignment is not None and assignment.tp else shape_of(spec)


def layouts_of(spec: TaskSpec) -> list[Shape]:
    """The layouts that a plan may give the task, its own among them, in the order that decides ties: as the task has
    them, whichever it is in now."""
    listed = [Shape(layout.tp, layout.pp) for layout in spec.layouts]
    own = shape_of(spec)
    return list(dict.fromkeys(listed if own in listed else [own, *listed]))


def micro_batch_in(spec: TaskSpec, shape: Shape) -> int:
    """Samples of a micro-batch in a layout."""
    given = next((one.micro_batch for one in spec.layouts if Shape(one.tp, one.pp) == shape), 0)
    return given or spec.micro_batch


def most_workers(spec: TaskSpec, shape: Shape) -> int:
    """The most that a plan may give the task in a layout: whole replicas, no more than micro-batches or lanes (those
    that share a lane compute one after the other)."""
    micro_batches = spec.global_batch // micro_batch_in(spec, shape)
    replicas = min(spec.max_workers // shape.workers, micro_batches, spec.lanes or micro_batches)
    return replicas * shape.workers


def asked_by_plan(spec: TaskSpec, assignment: TaskAssignment, epoch: int) -> ReshapeRequested | None:
    """What a plan asks of the task, as a person would; None where it stays in its layout, or ends."""
    shape = planned_shape(spec, assignment)
    if not assignment.workers or shape == shape_of(spec):
        return None
    return ReshapeRequested(
        task=spec.name,
        tp=shape.tp,
        pp=shape.pp,
        min_workers=spec.min_workers,
        max_workers=spec.max_workers,
        reason=f"plan {epoch} has chosen it",
    )


def is_in_place(spec: TaskSpec, asked: ReshapeRequested) -> bool:
    """The task's workers can stay: only their number is another."""
    of = reshaped(spec, asked)
    return (spec.tp, spec.pp, spec.iterations, spec.optimizer) == (of.tp, of.pp, of.iterations, of.optimizer)


def changes_nothing(spec: TaskSpec, asked: ReshapeRequested) -> bool:
    """The task is what it is asked to be."""
    return reshaped(spec, asked) == spec


def change(spec: TaskSpec, asked: ReshapeRequested) -> str:
    """What becomes of what, in words."""
    of = reshaped(spec, asked)
    forms = [
        (f"tp {spec.tp}, pp {spec.pp}", f"tp {of.tp}, pp {of.pp}"),
        (f"iterations {spec.iterations}", f"{of.iterations}"),
        (f"learning rate {spec.optimizer.lr:g}", f"{of.optimizer.lr:g}"),
    ]
    return "; ".join(f"{before} becomes {after}" for before, after in forms if not f" {before}".endswith(f" {after}"))


def reshaped(spec: TaskSpec, asked: ReshapeRequested | TaskReshaped) -> TaskSpec:
    """The task as it is from then on. Throughput that was given for more workers than it may have is left out; where it
    was given for the new layout, that holds. In a layout that a person asks for the task stays, whatever it might have.
    """
    by_plan = isinstance(asked, TaskReshaped) and asked.plan > 0
    layouts = spec.layouts if by_plan or (spec.tp, spec.pp) == (asked.tp, asked.pp) else ()
    given, micro_batch = spec.throughput, spec.micro_batch
    if by_plan:
        given = next((one.throughput for one in layouts if (one.tp, one.pp) == (asked.tp, asked.pp)), given)
        micro_batch = micro_batch_in(spec, Shape(asked.tp, asked.pp))
    most = asked.max_workers
    return replace(
        spec,
        layouts=tuple([replace(one, throughput=_up_to(most, one.throughput)) for one in layouts]),
        tp=asked.tp,
        pp=asked.pp,
        micro_batch=micro_batch,
        min_workers=asked.min_workers,
        max_workers=most,
        throughput=_up_to(most, given),
        iterations=asked.iterations or spec.iterations,
        optimizer=spec.optimizer if asked.lr is None else replace(spec.optimizer, lr=asked.lr),
        args=_args(spec, asked),
    )


def _args(spec: TaskSpec, asked: ReshapeRequested | TaskReshaped) -> tuple[str, ...]:
    """Megatron-LM has both in its flags."""
    flags = {"--train-iters": asked.iterations, "--lr": asked.lr}
    wanted = {name: repr(value) for name, value in flags.items() if value is not None}
    if spec.entry != megatron_lm.ENTRY or not wanted:
        return spec.args
    return megatron_lm.with_flags(spec.args, wanted)


def _up_to(most: int, throughput: Mapping[str, int]) -> dict[str, int]:
    return {workers: flops for workers, flops in throughput.items() if workers.isdecimal() and int(workers) <= most}
