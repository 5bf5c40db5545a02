"""`throughput_model` in a task file: T(x) from the model of Megatron (docs/design/throughput.md).

Rules
-----
* It is never in the log: a submission holds the tables that follow from it, one for each of the task's layouts
  (`layouts.py`), with its global_batch, micro_batch and seq.
* Values that the task leaves out of `model` and `global_batch` are the preset's. Those that it gives must agree: an
  iteration must be worth the same FLOP by both, or measured times would be compared with another model's.
* Only layouts remain that are the best for some number of workers on any of the types of GPU that it names.
* A layout is feasible if it has room for the gradients of the task's numerics as well, while a loss is healed too
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
from unicrond.events.vocabulary import LANES, GpuSpec, LayoutSpec, TaskSpec
from unicrond.events.vocabulary.phrases import guess
from unicrond.events.vocabulary.shape import Shape
from unicrond.intake.layouts import with_layouts

FIELD = "throughput_model"
#: By how much a task's FLOP per iteration may differ from its preset's: models of one size differ in details.
_AGREE = 0.15
#: How long the tables may make a task, and by how much more each point must then achieve than the one before.
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


def take_preset(data: dict[str, Any]) -> tuple[Preset | None, list[FieldFault]]:
    """Take the preset out of a task's `data`, and let it fill in what the task leaves out."""
    if FIELD not in data:
        return None, []
    choice = data.pop(FIELD)
    preset_faults = list(faults(choice, Preset, (FIELD,)))
    if "throughput" in data:
        preset_faults.append(FieldFault((FIELD,), "and throughput are both given; keep one"))
    if preset_faults:
        return None, preset_faults
    preset = msgspec.convert(choice, Preset)
    preset_faults = list(_unknown(preset))
    if preset_faults:
        return None, preset_faults
    from unicrond.throughput.presets import MODELS

    model_preset = MODELS[preset.model]
    if isinstance(model := data.setdefault("model", {}), dict):
        sizes = {"layers": model_preset.layers, "hidden": model_preset.hidden_size, "heads": model_preset.heads}
        for name, size in {**sizes, "seq": model_preset.seq, "vocab": model_preset.vocab}.items():
            model.setdefault(name, size)
    data.setdefault("global_batch", model_preset.batch)
    return preset, []


def fill(
    spec: TaskSpec, preset: Preset, shapes: Sequence[Shape], *, is_free: bool
) -> tuple[TaskSpec, list[FieldFault]]:
    """Return the task with the tables of its preset, one for each worthwhile layout of `shapes` (its own is the first),
    and no faults; or the task unchanged, with the faults. `is_free`: the file gives neither tp nor pp, so its own
    layout is the best for most workers."""
    from unicrond.throughput.presets import MODELS

    model_preset = MODELS[preset.model]
    expected, flop = model_preset.flops_per_sequence(spec.model.seq) * spec.global_batch, iteration_flop(spec)
    if abs(flop - expected) > _AGREE * expected:
        text = f"an iteration of this model is {flop:.3g} FLOP, of {preset.model} {expected:.3g}; leave model out"
        return spec, [FieldFault(("model",), text)]
    try:
        if len(shapes) > 1:
            task = _choose_layouts(spec, preset, shapes, is_free=is_free)
            if task is not None:
                return task, []
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


def fill_further_gpus(spec: TaskSpec, preset: Preset) -> TaskSpec:
    """Return the task with T on the preset's further types of GPU, for each of its layouts: 0 where it fits nowhere."""
    shapes = list(dict.fromkeys([spec.shape, *(layout.shape for layout in spec.layouts)]))
    gpus = []
    for gpu, tables in zip(preset.also, _further_tables(spec, preset, shapes), strict=True):
        layouts = [
            LayoutSpec(**shape._asdict(), throughput=tables[shape] or _zero_table(shape))
            for shape in shapes
            if shape.workers <= spec.max_workers
        ]
        gpus.append(GpuSpec(gpu=gpu, layouts=tuple(layouts)))
    return replace(spec, gpus=tuple(gpus))


def _choose_layouts(spec: TaskSpec, preset: Preset, shapes: Sequence[Shape], *, is_free: bool) -> TaskSpec | None:
    """Return the task with the worthwhile layouts; None where its own fits nowhere.

    There are as many lanes as there may be replicas in any of them; where its own then had no room on some numbers of
    workers, as many as in its own: no layout has more replicas than lanes.
    """
    own_shape = shapes[0]
    fewest = min([spec.micro_batches, *map(spec.micro_batches_in, shapes)])
    narrow = _in_lanes(spec, 1) if is_free else _in_lanes(spec, min(spec.lanes, fewest))
    tables = _tables(narrow, preset, shapes)
    if not is_free and not tables[own_shape]:
        return None
    best = _worthwhile([tables, *_further_tables(narrow, preset, shapes)], own_shape, is_free=is_free)
    if not any(tables[shape] for shape in best):
        return None
    replicas = min(spec.max_workers // min(shape.workers for shape in best), fewest)
    wide = _in_lanes(spec, replicas)
    wider = _tables(wide, preset, best)
    if is_free or wider[own_shape].keys() == tables[own_shape].keys():
        spec, tables = wide, wider
    else:
        spec = narrow
        most = {shape: (spec.lanes or replicas) * shape.workers for shape in best}
        tables = {shape: {n: flops for n, flops in tables[shape].items() if int(n) <= most[shape]} for shape in best}
    best = _worthwhile([tables, *_further_tables(spec, preset, best)], own_shape, is_free=is_free)
    if not any(tables[shape] for shape in best):
        return None
    if is_free:
        most_of = {
            shape: max(((int(n), flops) for n, flops in tables[shape].items()), default=(0, 0)) for shape in best
        }
        own_shape = max(best, key=lambda shape: most_of[shape])
        best = list(dict.fromkeys([own_shape, *best]))
    tables = {shape: tables[shape] or _zero_table(shape) for shape in best}
    layout = {**own_shape._asdict(), "micro_batch": own_shape.micro_batch or spec.micro_batch}
    del layout["vpp"], layout["ep"]
    inner = {
        name: size for name, size in (("vpp", own_shape.vpp), ("ep", own_shape.ep)) if size > 1 or getattr(spec, name)
    }
    spec = replace(spec, **layout, **inner, throughput=tables[own_shape])
    return with_layouts(spec, best, tables)


def _worthwhile(on_types: Sequence[_Tables], own_shape: Shape, *, is_free: bool) -> list[Shape]:
    """Return the layouts that are the best somewhere on any type of GPU; the main type's first."""
    best = list(dict.fromkeys([shape for tables in on_types for shape in best_layouts(tables)]))
    return best if is_free else list(dict.fromkeys([own_shape, *best]))


def _further_tables(spec: TaskSpec, preset: Preset, shapes: Sequence[Shape]) -> list[dict[Shape, dict[str, int]]]:
    """Return T of each layout, by workers, on each further type of GPU."""
    return [_tables(spec, replace(preset, gpu=gpu), shapes) for gpu in preset.also]


def _zero_table(shape: Shape) -> dict[str, int]:
    """Return T of a layout that fits nowhere."""
    return {str(shape.workers): 0}


def _in_lanes(spec: TaskSpec, lanes: int) -> TaskSpec:
    """Return the task with so many lanes, unless its file gives a number, or it has none."""
    return spec if not spec.lanes or LANES in spec.env else replace(spec, env={**spec.env, LANES: str(lanes)})


def _tables(spec: TaskSpec, preset: Preset, shapes: Sequence[Shape]) -> dict[Shape, dict[str, int]]:
    """Return T of each layout, by workers; empty where it fits nowhere. Raise ValueError for impossible
    combinations."""
    import numpy as np

    from unicrond.throughput.layouts import Layout, ThroughputQuery, job, pipeline_degrees, tensor_degrees
    from unicrond.throughput.model import Floats, Ints, memory_bytes, parameters, table
    from unicrond.throughput.presets import GPUS, MODELS, STACKS

    def needed_bytes(job: ThroughputQuery, layout: Layout, dp: Ints) -> Floats:
        """Return the memory of a worker with all gradients that it holds, in place of the one that Megatron has."""
        task = replace(spec, micro_batch=layout.micro_batch)
        gradient_counts = np.array([gradients(task, replicas).most for replicas in dp.tolist()])
        more_bytes = parameters(job, layout) * (gradient_counts * ELEMENT_BYTES - job.stack.gradient_bytes)
        return memory_bytes(job, layout, dp) + more_bytes

    model, gpu = MODELS[preset.model], GPUS[preset.gpu]
    stack = STACKS[preset.stack] if preset.stack else STACKS[gpu.stack]
    tps, pps = tensor_degrees(model, gpu), pipeline_degrees(model, stack)
    tables: dict[Shape, dict[str, int]] = {}
    for shape in shapes:
        if len(shapes) > 1 and (shape.tp not in tps or shape.pp not in pps):
            tables[shape] = {}  # of several layouts only those count that divide the preset's model
            continue
        # Coarse: each of the workers that share a sequence, or an assigned micro-batch's samples, computes its share as
        # one replica would, and what they exchange is not counted.
        sharers = shape.cp * shape.data
        question = job(
            model,
            gpu,
            stack=stack,
            batch=spec.global_batch // shape.data,
            seq=spec.model.seq // shape.cp,
            tp=shape.tp,
            pp=shape.pp,
            micro_batch=shape.micro_batch or spec.micro_batch,
            # A program of the user's own may interleave its stages in its own way; for the others the number is known.
            chunks=None if spec.entry not in ENTRIES and shape.vpp == 1 else shape.vpp,
        )
        points = table(question, spec.max_workers // sharers, needed_bytes=needed_bytes)
        tables[shape] = {str(workers * sharers): flops * sharers for workers, flops in points.items()}
    return tables


def shorten_tables(spec: TaskSpec) -> TaskSpec:
    """Return the task with fewer points in its tables, where all of them would make it too long for the log. Between
    two points the smaller counts: no T is understated by more than the step, and none is overstated but where more
    workers would achieve less."""
    whole = spec
    for step in _STEPS:
        if len(msgspec.msgpack.encode(spec)) <= _TABLES_BYTES:
            break
        layouts = _with_steps(whole.layouts, step)
        gpus = tuple([replace(gpu, layouts=_with_steps(gpu.layouts, step)) for gpu in whole.gpus])
        spec = replace(whole, throughput=_sparse(whole.throughput, step), layouts=layouts, gpus=gpus)
    return spec


def _with_steps(layouts: tuple[LayoutSpec, ...], step: float) -> tuple[LayoutSpec, ...]:
    return tuple([replace(layout, throughput=_sparse(layout.throughput, step)) for layout in layouts])


def _sparse(table: Mapping[str, int], step: float) -> dict[str, int]:
    """Return only the points that achieve so much more than the one before them."""
    points: dict[str, int] = {}
    best = 0.0
    for workers, flops in sorted(table.items(), key=lambda point: int(point[0])):
        if not points or flops > best * (1.0 + step):
            points[workers], best = flops, float(flops)
    return points


def best_layouts(tables: _Tables) -> list[Shape]:
    """Return the layouts that are the best for some number of workers, and better than any for fewer."""
    by_count: dict[int, tuple[int, Shape]] = {}
    for shape, table in tables.items():
        for workers, flops in table.items():
            if int(workers) not in by_count or flops > by_count[int(workers)][0]:
                by_count[int(workers)] = (flops, shape)
    best, shapes = 0, []
    for _, (flops, shape) in sorted(by_count.items()):
        if flops > best:
            best = flops
            shapes.append(shape)
    return list(dict.fromkeys(shapes))


def _unknown(preset: Preset) -> Iterator[FieldFault]:
    from unicrond.throughput.presets import GPUS, MODELS, STACKS

    names = [(name, getattr(preset, name)) for name in ("model", "gpu", "stack")]
    for name, value in (*names, *(("also", gpu) for gpu in preset.also)):
        presets: Mapping[str, object] = {"model": MODELS, "stack": STACKS}.get(name, GPUS)
        if value not in presets and (value or name != "stack"):
            yield FieldFault((FIELD, name), f"unknown {value!r}; {guess(value, list(presets))}")
