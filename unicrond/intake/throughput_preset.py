"""`throughput_model` in a task file: T(x) from the model of Megatron (docs/design/throughput.md).

Rules
-----
* The log never sees it: what is submitted holds the tables that follow from it, one for each of the task's layouts
  (`layouts.py`), with its global_batch, micro_batch and seq.
* What the task leaves out of `model` and `global_batch` is the preset's. What it gives must agree: an iteration
  must be worth the same FLOP by both, or measured times would be held against another model's.
* Kept are the layouts that are the best for some number of workers on any of the types of GPU that it names.
* Feasible is what has room for the gradients of the task's numerics as well, a loss being healed among them
  (`unicrond/core/worth/gradient_memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from unicrond.core.state.field_faults import FieldFault, faults
from unicrond.core.state.work import iteration_flop
from unicrond.core.tasks.task_rules import ENTRIES, SPEC_BYTES_MAX
from unicrond.core.worth.gradient_memory import ELEMENT_BYTES, gradients
from unicrond.events.host.did_you_mean import guess
from unicrond.events.vocabulary import LANES, GpuSpec, LayoutSpec, TaskSpec
from unicrond.events.vocabulary.shape import Shape
from unicrond.intake.layouts import with_layouts

FIELD = "throughput_model"
#: A task's FLOP per iteration may differ so much from its preset's: models of one size differ in details.
_AGREE = 0.15
#: As long a task may become by its tables, and by how much more each point must then achieve than the one before.
_TABLES_BYTES = SPEC_BYTES_MAX * 3 // 4
_STEPS = (0.0, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
#: T of each layout, by workers.
_Tables: TypeAlias = Mapping[Shape, Mapping[str, int]]


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names of throughput/presets.py. `stack`: empty = the GPU's usual one. `also`: further types of GPU."""

    model: str
    gpu: str
    stack: str = ""
    also: tuple[str, ...] = ()


def take(data: dict[str, Any]) -> tuple[Preset | None, list[FieldFault]]:
    """Take the preset out of a task's `data`, and let it fill in what the task leaves out."""
    if FIELD not in data:
        return None, []
    given = data.pop(FIELD)
    found = list(faults(given, Preset, (FIELD,)))
    if "throughput" in data:
        found.append(FieldFault((FIELD,), "and throughput are both given; keep one"))
    if found:
        return None, found
    preset = msgspec.convert(given, Preset)
    found = list(_unknown(preset))
    if found:
        return None, found
    from unicrond.throughput.presets import MODELS

    known = MODELS[preset.model]
    if isinstance(model := data.setdefault("model", {}), dict):
        sizes = {"layers": known.layers, "hidden": known.hidden_size, "heads": known.heads}
        for name, size in {**sizes, "seq": known.seq, "vocab": known.vocab}.items():
            model.setdefault(name, size)
    data.setdefault("global_batch", known.batch)
    return preset, []


def fill(
    spec: TaskSpec, preset: Preset, shapes: Sequence[Shape], *, is_free: bool
) -> tuple[TaskSpec, list[FieldFault]]:
    """The task with the tables that its preset stands for, one for each of `shapes` (its own is the first) that is
    worth it; or what keeps it from having one. `is_free`: the file gives neither tp nor pp, so its own layout is the
    best for most workers."""
    from unicrond.throughput.presets import MODELS

    known = MODELS[preset.model]
    expected, told = known.flops_per_sequence(spec.model.seq) * spec.global_batch, iteration_flop(spec)
    if abs(told - expected) > _AGREE * expected:
        text = f"an iteration of this model is {told:.3g} FLOP, of {preset.model} {expected:.3g}; leave model out"
        return spec, [FieldFault(("model",), text)]
    try:
        if len(shapes) > 1:
            chosen = _chosen(spec, preset, shapes, is_free=is_free)
            if chosen is not None:
                return chosen, []
        points = _tables(spec, preset, [spec.cut])[spec.cut]
    except ValueError as error:
        return spec, [FieldFault((FIELD,), str(error))]
    if not points:
        shape = f"{spec.cut} and micro_batch {spec.micro_batch}"
        where = f"on up to {spec.max_workers} {preset.gpu}"
        text = f"{preset.model} with {shape} fits nowhere {where}; see `unicronctl throughput`"
        if spec.lanes:
            text += f" ({spec.lanes} lanes; fewer {LANES} or numerics: follow take less memory)"
        return spec, [FieldFault((FIELD,), text)]
    return replace(spec, throughput=points), []


def on_others(spec: TaskSpec, preset: Preset) -> TaskSpec:
    """The task with T on the preset's further types of GPU, for each of its layouts: 0 where it fits nowhere."""
    shapes = list(dict.fromkeys([spec.shape, *(one.shape for one in spec.layouts)]))
    gpus = []
    for gpu, tables in zip(preset.also, _on_also(spec, preset, shapes), strict=True):
        layouts = [
            LayoutSpec(**shape._asdict(), throughput=tables[shape] or _nothing(shape))
            for shape in shapes
            if shape.workers <= spec.max_workers
        ]
        gpus.append(GpuSpec(gpu=gpu, layouts=tuple(layouts)))
    return replace(spec, gpus=tuple(gpus))


def _chosen(spec: TaskSpec, preset: Preset, shapes: Sequence[Shape], *, is_free: bool) -> TaskSpec | None:
    """The task with the layouts that are worth it; None where its own fits nowhere.

    There are as many lanes as there may be replicas in any of them; where its own then had no room on some numbers of
    workers, as many as in its own: no layout has more replicas than lanes.
    """
    own = shapes[0]
    fewest = spec.global_batch // max([spec.micro_batch, *(shape.micro_batch for shape in shapes)])
    narrow = _in_lanes(spec, 1) if is_free else _in_lanes(spec, min(spec.lanes, fewest))
    tables = _tables(narrow, preset, shapes)
    if not is_free and not tables[own]:
        return None
    kept = _kept([tables, *_on_also(narrow, preset, shapes)], own, is_free=is_free)
    if not any(tables[shape] for shape in kept):
        return None
    replicas = min(spec.max_workers // min(shape.workers for shape in kept), fewest)
    wide = _in_lanes(spec, replicas)
    wider = _tables(wide, preset, kept)
    if is_free or wider[own].keys() == tables[own].keys():
        spec, tables = wide, wider
    else:
        spec = narrow
        most = {shape: (spec.lanes or replicas) * shape.workers for shape in kept}
        tables = {one: {n: flops for n, flops in tables[one].items() if int(n) <= most[one]} for one in kept}
    kept = _kept([tables, *_on_also(spec, preset, kept)], own, is_free=is_free)
    if not any(tables[shape] for shape in kept):
        return None
    if is_free:
        most_of = {one: max(((int(n), flops) for n, flops in tables[one].items()), default=(0, 0)) for one in kept}
        own = max(kept, key=lambda one: most_of[one])
        kept = list(dict.fromkeys([own, *kept]))
    tables = {shape: tables[shape] or _nothing(shape) for shape in kept}
    layout = {"tp": own.tp, "pp": own.pp, "micro_batch": own.micro_batch or spec.micro_batch}
    inner = {name: size for name, size in (("vpp", own.vpp), ("ep", own.ep)) if size > 1 or getattr(spec, name)}
    spec = replace(spec, **layout, **inner, throughput=tables[own])
    return with_layouts(spec, kept, tables)


def _kept(on_types: Sequence[_Tables], own: Shape, *, is_free: bool) -> list[Shape]:
    """The layouts that are worth it on any type of GPU; the main type's first."""
    best = list(dict.fromkeys([shape for tables in on_types for shape in worth(tables)]))
    return best if is_free else list(dict.fromkeys([own, *best]))


def _on_also(spec: TaskSpec, preset: Preset, shapes: Sequence[Shape]) -> list[dict[Shape, dict[str, int]]]:
    """T of each layout, by workers, on each further type of GPU."""
    return [_tables(spec, replace(preset, gpu=gpu), shapes) for gpu in preset.also]


def _nothing(shape: Shape) -> dict[str, int]:
    """T of a layout that fits nowhere."""
    return {str(shape.workers): 0}


def _in_lanes(spec: TaskSpec, lanes: int) -> TaskSpec:
    """The task with so many lanes, unless its file says how many, or it has none."""
    return spec if not spec.lanes or LANES in spec.env else replace(spec, env={**spec.env, LANES: str(lanes)})


def _tables(spec: TaskSpec, preset: Preset, shapes: Sequence[Shape]) -> dict[Shape, dict[str, int]]:
    """T of each layout, by workers; empty where it fits nowhere. Raises ValueError for what cannot be."""
    import numpy as np

    from unicrond.throughput.layouts import Layout, ThroughputQuery, job, pipeline_degrees, tensor_degrees
    from unicrond.throughput.model import Floats, Ints, memory_bytes, parameters, table
    from unicrond.throughput.presets import GPUS, MODELS, STACKS

    def needed_bytes(job: ThroughputQuery, layout: Layout, dp: Ints) -> Floats:
        """In the place of the one gradient that Megatron has: all that a worker holds."""
        dealt = replace(spec, micro_batch=layout.micro_batch)
        held = np.array([gradients(dealt, replicas).most for replicas in dp.tolist()])
        more_bytes = parameters(job, layout) * (held * ELEMENT_BYTES - job.stack.gradient_bytes)
        return memory_bytes(job, layout, dp) + more_bytes

    known, gpu = MODELS[preset.model], GPUS[preset.gpu]
    stack = STACKS[preset.stack] if preset.stack else STACKS[gpu.stack]
    tps, pps = tensor_degrees(known, gpu), pipeline_degrees(known, stack)
    found: dict[Shape, dict[str, int]] = {}
    for shape in shapes:
        if len(shapes) > 1 and (shape.tp not in tps or shape.pp not in pps):
            found[shape] = {}  # of several, those that divide the preset's model
            continue
        question = job(
            known,
            gpu,
            stack=stack,
            batch=spec.global_batch,
            seq=spec.model.seq,
            tp=shape.tp,
            pp=shape.pp,
            micro_batch=shape.micro_batch or spec.micro_batch,
            # Whoever wrote the program knows whether its stages are interleaved; of the others it is known.
            chunks=None if spec.entry not in ENTRIES and shape.vpp == 1 else shape.vpp,
        )
        points = table(question, spec.max_workers, needed_bytes=needed_bytes)
        found[shape] = {str(workers): flops for workers, flops in points.items()}
    return found


def shortened(spec: TaskSpec) -> TaskSpec:
    """The task with fewer points in its tables, where all of them would make it too long for the log. Between two the
    smaller holds: no T is said to be less by more than the step, nor more but where more workers would achieve less."""
    known = spec
    for step in _STEPS:
        if len(msgspec.msgpack.encode(spec)) <= _TABLES_BYTES:
            break
        layouts = _with_steps(known.layouts, step)
        gpus = tuple([replace(gpu, layouts=_with_steps(gpu.layouts, step)) for gpu in known.gpus])
        spec = replace(known, throughput=_sparse(known.throughput, step), layouts=layouts, gpus=gpus)
    return spec


def _with_steps(layouts: tuple[LayoutSpec, ...], step: float) -> tuple[LayoutSpec, ...]:
    return tuple([replace(one, throughput=_sparse(one.throughput, step)) for one in layouts])


def _sparse(table: Mapping[str, int], step: float) -> dict[str, int]:
    """Only points that achieve so much more than the one before them."""
    kept: dict[str, int] = {}
    best = 0.0
    for workers, flops in sorted(table.items(), key=lambda point: int(point[0])):
        if not kept or flops > best * (1.0 + step):
            kept[workers], best = flops, float(flops)
    return kept


def worth(tables: _Tables) -> list[Shape]:
    """The layouts that are the best for some number of workers, and better than any for fewer."""
    by_count: dict[int, tuple[int, Shape]] = {}
    for shape, table in tables.items():
        for workers, flops in table.items():
            if int(workers) not in by_count or flops > by_count[int(workers)][0]:
                by_count[int(workers)] = (flops, shape)
    best, found = 0, []
    for _, (flops, shape) in sorted(by_count.items()):
        if flops > best:
            best = flops
            found.append(shape)
    return list(dict.fromkeys(found))


def _unknown(preset: Preset) -> Iterator[FieldFault]:
    from unicrond.throughput.presets import GPUS, MODELS, STACKS

    asked = [(name, getattr(preset, name)) for name in ("model", "gpu", "stack")]
    for name, value in (*asked, *(("also", gpu) for gpu in preset.also)):
        presets: Mapping[str, object] = {"model": MODELS, "stack": STACKS}.get(name, GPUS)
        if value not in presets and (value or name != "stack"):
            yield FieldFault((FIELD, name), f"unknown {value!r}; {guess(value, list(presets))}")
