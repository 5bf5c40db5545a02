"""Another layout for a running task, another end, another learning rate: what becomes of its description.

The way of a reshape: somebody asks (`ReshapeRequested`); the task is brought to the end of an iteration and hands its
state over; its workers end; it is described anew (`TaskReshaped`), planned for, and the first new workers put the
state together (decide.py). Where only the bounds change, no member has to leave: the rest a worker knows from its
birth.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from unicrond.events.megatron import command_line as megatron_lm
from unicrond.events.vocabulary import ReshapeRequested, TaskAssignment, TaskReshaped, TaskSpec, TaskStart
from unicrond.events.vocabulary.shape import Shape


def layout_key(shape: Shape) -> str:
    """Return the name of a layout in the state: "2x1", "2x4 vpp2"."""
    degrees = (("vpp", shape.vpp, 1), ("ep", shape.ep, 1), ("mb", shape.micro_batch, 0))
    more = (*degrees, ("cp", shape.cp, 1), ("etp", shape.etp, 0))
    return f"{shape.tp}x{shape.pp}" + "".join(f" {name}{size}" for name, size, usual in more if size != usual)


def planned_shape(spec: TaskSpec, assignment: TaskAssignment | None) -> Shape:
    """Return the layout that a plan gives the task: its own where the plan had no choice."""
    return (assignment.shape if assignment is not None else None) or spec.shape


def layouts_of(spec: TaskSpec) -> list[Shape]:
    """Return the layouts that a plan may give the task, its own among them, in the order that decides ties: as the task
    lists them, whichever it is in now."""
    listed = [layout.shape for layout in spec.layouts]
    return list(dict.fromkeys(listed if spec.shape in listed else [spec.shape, *listed]))


def most_workers(spec: TaskSpec, shape: Shape) -> int:
    """Return the most workers that a plan may give the task in a layout: whole replicas, no more than micro-batches or
    lanes (those that share a lane compute one after the other)."""
    micro_batches = spec.micro_batches_in(shape)
    replicas = min(spec.max_workers // shape.workers, micro_batches, spec.lanes or micro_batches)
    return replicas * shape.workers


def reshape_of_plan(spec: TaskSpec, assignment: TaskAssignment, epoch: int) -> ReshapeRequested | None:
    """Return what a plan asks of the task, as a person would; None where it stays in its layout, or ends."""
    shape = planned_shape(spec, assignment)
    if not assignment.workers or shape == spec.shape:
        return None
    return ReshapeRequested(
        task=spec.name,
        **shape._asdict(),
        min_workers=spec.min_workers,
        max_workers=spec.max_workers,
        reason=f"plan {epoch} has chosen it",
    )


def is_in_place(spec: TaskSpec, request: ReshapeRequested) -> bool:
    """Return whether the task's workers can stay: only their number changes."""
    target = reshaped(spec, request)
    fixed = (spec.cut, spec.micro_batch, spec.iterations, spec.optimizer)
    return fixed == (target.cut, target.micro_batch, target.iterations, target.optimizer)


def changes_nothing(spec: TaskSpec, request: ReshapeRequested) -> bool:
    """Return whether the task is already what the request asks for."""
    return reshaped(spec, request) == spec


def change(spec: TaskSpec, request: ReshapeRequested) -> str:
    """Say in words what becomes of what."""
    target = reshaped(spec, request)
    forms = [
        (str(spec.cut), str(target.cut)),
        (f"micro_batch {spec.micro_batch}", f"{target.micro_batch}"),
        (f"iterations {spec.iterations}", f"{target.iterations}"),
        (f"learning rate {spec.optimizer.lr:g}", f"{target.optimizer.lr:g}"),
    ]
    return "; ".join(f"{before} becomes {after}" for before, after in forms if not f" {before}".endswith(f" {after}"))


def reshaped(spec: TaskSpec, request: ReshapeRequested | TaskReshaped) -> TaskSpec:
    """Return the task as it is from then on. Throughput that was given for more workers than it may have is left out;
    where it was given for the new layout, that holds. In a layout that a person asks for the task stays, whatever it
    might have."""
    by_plan = isinstance(request, TaskReshaped) and request.plan > 0
    micro_batch = request.micro_batch or spec.micro_batch
    stays = (spec.cut, spec.micro_batch) == (request.shape.cut, micro_batch)
    layouts, table = spec.layouts if by_plan or stays else (), spec.throughput
    if by_plan:
        table = next((layout.throughput for layout in layouts if layout.shape == request.shape), table)
    most = request.max_workers
    return replace(
        spec,
        layouts=tuple([replace(layout, throughput=_up_to(most, layout.throughput)) for layout in layouts]),
        **_layout(spec, request.shape._replace(micro_batch=micro_batch)),
        min_workers=request.min_workers,
        max_workers=most,
        throughput=_up_to(most, table),
        iterations=request.iterations or spec.iterations,
        optimizer=spec.optimizer if request.lr is None else replace(spec.optimizer, lr=request.lr),
        args=_args(spec, request),
        start=_start(spec, request),
    )


def _start(spec: TaskSpec, request: ReshapeRequested | TaskReshaped) -> TaskStart | None:
    """Return how the task begins. One whose end or learning rate has changed says so to its workers: by these they
    compare it no longer with states of earlier runs."""
    settings = (request.iterations or spec.iterations, spec.optimizer.lr if request.lr is None else request.lr)
    if spec.start is None or settings == (spec.iterations, spec.optimizer.lr):
        return spec.start
    return replace(spec.start, is_changed=True)


def _layout(spec: TaskSpec, shape: Shape) -> dict[str, int]:
    """Return the fields of a layout. A degree that the program sets by itself (0) stays so as long as nothing else is
    asked for."""
    sizes = {"vpp": spec.vpp, "ep": spec.ep}
    return {name: 0 if size == 1 and sizes.get(name) == 0 else size for name, size in shape._asdict().items()}


def _args(spec: TaskSpec, request: ReshapeRequested | TaskReshaped) -> tuple[str, ...]:
    """Return the task's args. Megatron-LM has iterations and learning rate in its flags."""
    flags = {"--train-iters": request.iterations, "--lr": request.lr}
    changes = {name: repr(value) for name, value in flags.items() if value is not None}
    if spec.entry != megatron_lm.ENTRY or not changes:
        return spec.args
    return megatron_lm.with_flags(spec.args, changes)


def _up_to(most: int, throughput: Mapping[str, int]) -> dict[str, int]:
    return {workers: flops for workers, flops in throughput.items() if workers.isdecimal() and int(workers) <= most}
