"""Rules for tasks beyond the types of their fields. Pure: the same for a file, for the API and for the log.

What these rules let pass, the planner and the log can carry. Whether the entry script exists is not a rule: each
machine sees another disk (`task_file.py` looks at it, where a person waits for the answer).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from posixpath import normpath
from typing import Any

import msgspec

from unicrond.core.state.field_faults import FieldFault, Place
from unicrond.core.state.work import LINEAR_FLOPS
from unicrond.core.tasks.reshaping import layouts_of, most_workers
from unicrond.events.host.task_environment import refusal
from unicrond.events.megatron import command_line as megatron_lm
from unicrond.events.megatron import layouts as megatron_layouts
from unicrond.events.vocabulary import DETERMINISM, DETERMINISTIC, LANES, TaskSpec
from unicrond.events.vocabulary.shape import Shape
from unicrond.events.vocabulary.tasks import SCHEMES, is_url

#: The built-in GPT pretraining.
BUILT_IN = "gpt"
#: Entries that are no script.
ENTRIES = (BUILT_IN, megatron_lm.ENTRY)
#: A spec travels inside commands, and is not to fill them.
SPEC_BYTES_MAX = 64 * 1024
#: Layouts of a task, at most: a plan weighs them all.
LAYOUTS_MAX = 64
#: Types of GPU with a T of their own, at most.
GPUS_MAX = 16
#: Weighted FLOP/s of one task: half of what a plan's integers hold (63 bits).
WAF_MAX = 2**62
#: Degrees that the built-in GPT cannot be cut by.
_MISSING = {"vpp": "virtual pipeline stages", "ep": "experts", "cp": "context parallelism"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
#: Where a secret is: a file of the node, or a variable of its agent.
_SOURCE = re.compile(r"file:/[^\0]+|env:[A-Za-z_][A-Za-z0-9_]*")
#: A bucket, and prefixes in it.
_OBJECTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._=+-]+)*/?")
PATHS: tuple[Place, ...] = (("entry",), ("cwd",), ("data",), ("checkpoint", "dir"))


def spec_faults(spec: TaskSpec) -> Iterator[FieldFault]:
    """Yield all that is wrong with a well-typed spec."""
    yield from _not_finite(spec)
    yield from _workers(spec)
    yield from _batches(spec)
    yield from _shape(spec)
    yield from _layouts(spec)
    yield from _gpus(spec)
    yield from _worth(spec)
    yield from _schedule(spec)
    yield from _paths(spec)
    yield from _program(spec)
    yield from _start(spec)
    yield from _secrets(spec)
    yield from _variables(spec)
    size_bytes = len(msgspec.msgpack.encode(spec))
    if size_bytes > SPEC_BYTES_MAX:
        yield FieldFault(
            (), f"the task is {size_bytes} bytes long, more than {SPEC_BYTES_MAX}; shorten args, env or tables"
        )


def _not_finite(part: msgspec.Struct, place: Place = ()) -> Iterator[FieldFault]:
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, msgspec.Struct):
            yield from _not_finite(value, (*place, name))
        elif isinstance(value, float) and not math.isfinite(value):
            yield FieldFault((*place, name), f"{value} is not finite; give a finite number")


def _workers(spec: TaskSpec) -> Iterator[FieldFault]:
    unit = spec.replica_workers
    if spec.min_workers > spec.max_workers:
        yield FieldFault(
            ("min_workers",), f"{spec.min_workers} is more than max_workers ({spec.max_workers}); lower it"
        )
    for name in ("min_workers", "max_workers"):
        value = getattr(spec, name)
        if value % unit and not spec.layouts and not any(_inside(spec, spec.cut)):
            near = " or ".join(str(n) for n in (value // unit * unit, (value // unit + 1) * unit) if n)
            names, sizes = zip(*spec.cut.factors.items(), strict=True)
            replica = f"{' * '.join(names)} = {' * '.join(map(str, sizes))}"
            yield FieldFault((name,), f"{value} is not a multiple of {replica}; use {near}")


def _batches(spec: TaskSpec) -> Iterator[FieldFault]:
    if spec.global_batch % spec.micro_batch:
        yield FieldFault(
            ("global_batch",),
            f"{spec.global_batch} is not a multiple of micro_batch ({spec.micro_batch});"
            f" use {_multiples(spec.global_batch, spec.micro_batch)}",
        )
        return
    replicas = spec.max_workers // spec.replica_workers
    if replicas > spec.micro_batches and not spec.layouts and not any(_inside(spec, spec.cut)):
        yield FieldFault(
            ("max_workers",),
            f"{replicas} replicas share {spec.micro_batches} micro-batches, so some would idle;"
            f" use at most {spec.micro_batches * spec.replica_workers}, or a larger global_batch",
        )


def _shape(spec: TaskSpec) -> Iterator[FieldFault]:
    """Yield, for the built-in GPT, what Megatron-core asserts when it builds the model; for Megatron-LM, what its flags
    forbid in another layout than theirs."""
    if problem := flag_problem(spec, spec.cut):
        yield FieldFault(("args",), problem)
    yield from _inside(spec, spec.cut)
    if spec.entry != BUILT_IN:
        return
    model = spec.model
    if model.hidden % model.heads:
        yield FieldFault(
            ("model", "hidden"),
            f"{model.hidden} does not divide among heads ({model.heads}); use {_multiples(model.hidden, model.heads)}",
        )
    for name in ("heads", "hidden", "vocab"):
        value = getattr(model, name)
        if value % spec.tp:
            yield FieldFault(
                ("model", name),
                f"{value} does not divide among tp ({spec.tp}); use {_multiples(value, spec.tp)}, or another tp",
            )
    if model.layers % spec.pp:
        yield FieldFault(
            ("model", "layers"),
            f"{model.layers} does not divide among pp ({spec.pp});"
            f" use {_multiples(model.layers, spec.pp)}, or another pp",
        )


def _inside(spec: TaskSpec, shape: Shape) -> Iterator[FieldFault]:
    """Yield what is wrong with vpp, ep, etp and cp, whatever the program is and however large."""
    if spec.entry == BUILT_IN:
        for name, degree in (("vpp", shape.vpp), ("ep", shape.ep), ("cp", shape.cp)):
            if degree > 1:
                yield FieldFault((name,), f"is {degree}, but the built-in GPT has no {_MISSING[name]}; leave it out")
        if shape.etp:
            yield FieldFault(("etp",), f"is {shape.etp}, but the built-in GPT has no experts; leave it out")
        return
    if shape.vpp > 1 and shape.pp == 1:
        yield FieldFault(("vpp",), f"is {shape.vpp}, but chunks of a stage are interleaved from pp 2 on; use vpp 1")
    if spec.entry != megatron_lm.ENTRY:
        yield from _of_own_loop(spec, shape)
    else:
        yield from _not_shared(spec, shape)


def _of_own_loop(spec: TaskSpec, shape: Shape) -> Iterator[FieldFault]:
    """Yield what a loop of one's own cannot have: nothing in it gives each worker its part of a sequence, or sums what
    several workers have of one expert. With ep alone a replica has as many data-parallel ranks, over which the loop
    shards its model (`fully_shard`); what it does instead is seen when it attaches."""
    if shape.data == shape.workers and not shape.etp:
        yield from _not_shared(spec, shape)
        return
    fix = f"use 1, or entry: {megatron_lm.ENTRY}"
    if shape.cp > 1:
        yield FieldFault(("cp",), f"is {shape.cp}, but context parallelism is not for a loop of your own yet; {fix}")
    if shape.tp % shape.ep:
        text = f"{shape.ep} does not divide tp ({shape.tp}): experts over more workers than that are not for a loop"
        yield FieldFault(("ep",), f"{text} of your own yet; use a divisor of tp, or entry: {megatron_lm.ENTRY}")
    elif shape.ep * shape.expert_tp != shape.tp:
        text = f"is {shape.etp}, but times ep ({shape.ep}) it must be tp ({shape.tp}) in a loop of your own, which sums"
        yield FieldFault(("etp",), f"{text} no copies of an expert; leave it out, or entry: {megatron_lm.ENTRY}")


def _not_shared(spec: TaskSpec, shape: Shape) -> Iterator[FieldFault]:
    """Yield that the data-parallel ranks inside a replica cannot share the global batch; of a layout without any others
    say that."""
    batch = (shape.micro_batch or spec.micro_batch) * shape.data
    if shape.data > 1 and spec.micro_batches_in(shape) * batch != spec.global_batch:
        text = f"{shape.ep} makes a replica of {shape.data} data-parallel ranks, and global_batch ({spec.global_batch})"
        yield FieldFault(("ep",), f"{text} is no multiple of their {batch} samples; use another ep, or global_batch")


def divides(spec: TaskSpec, shape: Shape) -> bool:
    """Return whether the model can be cut so; of a script of one's own little is known against it."""
    if cut_problem(spec, shape):
        return False
    model = spec.model
    uncut = any(size % shape.tp for size in (model.heads, model.hidden, model.vocab)) or model.layers % shape.pp
    return spec.entry != BUILT_IN or not uncut


def cut_problem(spec: TaskSpec, shape: Shape) -> str:
    """Return what keeps the program from being cut so, as one line; of the built-in GPT without the sizes of its
    model."""
    return flag_problem(spec, shape) or next(map(str, _inside(spec, shape)), "")


def flag_problem(spec: TaskSpec, shape: Shape) -> str:
    """Return which flag of Megatron-LM keeps it from being cut so, and why; "" where none does."""
    rules = flag_rules(spec)
    return rules.problem(_as_the_flags_have_it(spec, shape, rules.flags_layout)) if rules is not None else ""


def _as_the_flags_have_it(spec: TaskSpec, shape: Shape, flags: Shape) -> Shape:
    """Return the layout with the flags' vpp and ep where the task says nothing of them: there the flags hold, in every
    layout."""
    vpp = flags.vpp if spec.vpp == 0 and shape.vpp == 1 else shape.vpp
    ep = flags.ep if spec.ep == 0 and shape.ep == 1 else shape.ep
    return shape.cut._replace(vpp=vpp, ep=ep).plain


def flag_rules(spec: TaskSpec) -> megatron_layouts.LayoutRules | None:
    """Return what the flags of Megatron-LM say of layouts; None for any other program."""
    return megatron_layouts.layout_rules(spec.args) if spec.entry == megatron_lm.ENTRY else None


def nearest(spec: TaskSpec, tp: int, pp: int) -> Shape:
    """Return the layout with this tp and pp that is nearest to the task's: no more chunks of a stage, experts over no
    more workers; a sequence over as many."""
    current = spec.cut
    if (tp, pp) == (current.tp, current.pp):
        return current
    room = tp * current.cp
    inside = [ep for ep in range(min(current.ep, room), 0, -1) if room % ep == 0]
    as_now = [current._replace(tp=tp, pp=pp).plain] if current.data > 1 or current.etp else []
    alike = [*as_now, *(Shape(tp, pp, ep=ep, cp=current.cp) for ep in inside)]
    fewer = (shape._replace(vpp=vpp) for vpp in range(current.vpp if pp > 1 else 1, 0, -1) for shape in alike)
    return next((shape for shape in fewer if divides(spec, shape)), Shape(tp, pp, cp=current.cp))


def with_degrees(near: Shape, sizes: Mapping[str, int]) -> Shape:
    """Return the layout with these degrees in place of those of `near`, but for tp and pp. Experts over another number
    of workers are cut as is usual there, unless that is given, too."""
    degrees = {name: size for name, size in sizes.items() if size and name not in ("tp", "pp")}
    etp = near.etp if degrees.get("ep", near.ep) == near.ep else 0
    return near._replace(**{"etp": etp, **degrees}).plain


def _layouts(spec: TaskSpec) -> Iterator[FieldFault]:
    if not spec.layouts:
        return
    if len(spec.layouts) > LAYOUTS_MAX:
        yield FieldFault(("layouts",), f"are {len(spec.layouts)}, more than {LAYOUTS_MAX}; give fewer")
    for n, layout in enumerate(spec.layouts):
        place: Place = ("layouts", n)
        if not divides(spec, layout.shape):
            yield FieldFault(place, f"{layout.shape.cut} does not divide the model; leave it out")
        yield from _table(layout.throughput, spec.max_workers, (*place, "throughput"))
        if layout.micro_batch and spec.global_batch % layout.micro_batch:
            text = f"{layout.micro_batch} does not divide global_batch ({spec.global_batch}); use a divisor of it"
            yield FieldFault((*place, "micro_batch"), text)
    if len({bool(layout.micro_batch) for layout in spec.layouts}) > 1:
        yield FieldFault(("layouts",), "say micro_batch in some and not in others; give it in all or in none")
    fewest = min(layout.shape.workers for layout in spec.layouts)
    least = max(spec.min_workers, 1)
    if -(-least // fewest) * fewest > spec.max_workers and spec.min_workers <= spec.max_workers:
        text = (
            f"no layout has replicas that come to {spec.min_workers} to {spec.max_workers} workers; raise max_workers"
        )
        yield FieldFault(("max_workers",), text)
        return
    most = max(most_workers(spec, shape) for shape in layouts_of(spec))
    if spec.lanes and most < spec.min_workers <= spec.max_workers:
        text = (
            f"{spec.min_workers} is more than any layout gets ({most}): no more replicas than lanes ({spec.lanes}), no"
            " more lanes than the largest micro-batches come to; lower it, or use smaller micro-batches"
        )
        yield FieldFault(("min_workers",), text)


def _gpus(spec: TaskSpec) -> Iterator[FieldFault]:
    if len(spec.gpus) > GPUS_MAX:
        yield FieldFault(("gpus",), f"are {len(spec.gpus)}, more than {GPUS_MAX}; give fewer")
    names = [entry.gpu for entry in spec.gpus]
    for n, entry in enumerate(spec.gpus):
        if not entry.gpu or entry.gpu in names[:n]:
            yield FieldFault(("gpus", n, "gpu"), f"{entry.gpu!r} is empty or given twice; give each type once")
        for k, layout in enumerate(entry.layouts):
            yield from _table(layout.throughput, spec.max_workers, ("gpus", n, "layouts", k, "throughput"))


def _table(table: Mapping[str, int], most: int, place: Place) -> Iterator[FieldFault]:
    for key in table:
        if not re.fullmatch(r"[1-9][0-9]{0,8}", key) or int(key) > most:
            yield FieldFault((*place, key), f"must be a number of workers, 1 to max_workers ({most})")
            return


def _multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` beside `value`, as words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _worth(spec: TaskSpec) -> Iterator[FieldFault]:
    table = spec.throughput
    wrong = list(_table(table, spec.max_workers, ("throughput",)))
    if wrong:
        yield from wrong
        return
    layouts = [*spec.layouts, *(layout for gpu in spec.gpus for layout in gpu.layouts)]
    every = [*table.values(), *(flops for layout in layouts for flops in layout.throughput.values())]
    best = max(every) if every else spec.max_workers * LINEAR_FLOPS
    if not math.isfinite(spec.weight):
        return
    if not best:
        yield FieldFault(("throughput",), "every entry is 0, so the task would never run; give measured FLOP/s")
    elif int(spec.weight * best) < 1:
        yield FieldFault(("weight",), f"{spec.weight:g} is too small to count beside other tasks; raise it")
    elif int(spec.weight * best) > WAF_MAX:
        yield FieldFault(
            ("weight",), f"{spec.weight:g} * {best:.3g} FLOP/s is more than the planner can add up; lower it"
        )


def _schedule(spec: TaskSpec) -> Iterator[FieldFault]:
    optimizer = spec.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield FieldFault(("optimizer", "min_lr"), f"{optimizer.min_lr:g} is more than lr ({optimizer.lr:g}); lower it")
    name = "iterations" if optimizer.decay_iterations is None else "decay_iterations"
    decay = optimizer.decay_iterations or spec.iterations
    if optimizer.warmup_iterations >= decay:
        yield FieldFault(
            ("optimizer", "warmup_iterations"),
            f"{optimizer.warmup_iterations} leaves nothing of {name} ({decay}); use less than {decay}",
        )


def url_fault(url: str) -> str:
    """Return what is wrong with the URL of a prefix in an object store; "" for nothing."""
    scheme, _, path = url.partition("://")
    example = "; give one like s3://bucket/prefix"
    if "@" in path or "?" in path:
        fix = "credentials and options belong into the environment of the nodes, not into the URL"
        return f"has an {'@' if '@' in path else 'option'} where a bucket and a prefix should be: {fix}"
    if scheme not in SCHEMES:
        return f"{scheme!r} is none of the object stores that are taken ({', '.join(SCHEMES)}){example}, or a path"
    if not _OBJECTS.fullmatch(path) or {".", ".."} & set(path.split("/")):
        return f"{url!r} is not the URL of a prefix in an object store{example}"
    return ""


def _paths(spec: TaskSpec) -> Iterator[FieldFault]:
    for place in PATHS:
        value: Any = spec
        for name in place:
            value = getattr(value, str(name))
        if place == ("checkpoint", "dir") and is_url(value):
            if fault := url_fault(value):
                yield FieldFault(place, fault)
        elif value and not value.startswith("/") and not (place == ("entry",) and value in ENTRIES):
            suggestion = f"; give {', '.join(ENTRIES)} or an absolute path"
            choice = suggestion if place == ("entry",) else "; give an absolute path"
            yield FieldFault(place, f"{value!r} is a relative path, and nodes have other directories{choice}")


def _program(spec: TaskSpec) -> Iterator[FieldFault]:
    if spec.entry == BUILT_IN and spec.args:
        yield FieldFault(("args",), f"entry {BUILT_IN} takes none; remove them, or give a script as entry")
    if spec.entry == megatron_lm.ENTRY and not spec.cwd:
        yield FieldFault(("cwd",), "is not given; give the checkout of Megatron-LM that the script in args is in")
    for name, text in spec.env.items():
        if not _VARIABLE.fullmatch(name):
            yield FieldFault(("env", name), "is not a variable's name; use letters, digits and _")
        elif "\0" in text:
            yield FieldFault(("env", name), "holds a NUL character; remove it")
    wish = spec.env.get(DETERMINISTIC, DETERMINISM[0])
    if wish not in DETERMINISM:
        yield FieldFault(("env", DETERMINISTIC), f"{wish!r} is not one of {', '.join(DETERMINISM)}")
    lanes, most = spec.env.get(LANES, "1"), spec.fewest_micro_batches  # where that is 0, `_inside` says why
    if most and not (lanes.isascii() and lanes.isdecimal() and 1 <= int(lanes[:9]) <= most):
        yield FieldFault(("env", LANES), f"{lanes!r} is not a number of lanes; give 1 to {most} (micro-batches)")


def too_few_lanes(spec: TaskSpec) -> list[str]:
    """Warn where the task may have more replicas than lanes; an empty list where it may not."""
    replicas = min(spec.max_workers // spec.replica_workers, spec.micro_batches)
    if not 0 < spec.lanes < replicas:
        return []
    return [
        f"env.{LANES}: {spec.lanes} lanes for up to {replicas} replicas: those that share a lane compute one after the"
        " other, so more replicas are hardly faster; submit anew with more lanes, or with numerics: follow"
    ]


def _variables(spec: TaskSpec) -> Iterator[FieldFault]:
    for number, name in enumerate(spec.preload):
        if not _MODULE.fullmatch(name):
            yield FieldFault(
                ("preload", number), f"{name!r} is not a module's name; give one such as datasets or my.model"
            )
    for name in spec.env:
        if reason := refusal(name):
            yield FieldFault(("env", name), reason)


def _start(spec: TaskSpec) -> Iterator[FieldFault]:
    start = spec.start
    if start is None:
        return
    if (start.mode == "fork") != bool(start.source):
        yield FieldFault(("start", "source"), "names the task to fork, with mode fork alone; give both or neither")
    elif start.source == spec.name:
        yield FieldFault(("start", "source"), f"{start.source} is the task itself; give the fork another name")
    elif start.source_dir and normpath(start.source_dir) == normpath(spec.checkpoint.dir):
        yield FieldFault(("checkpoint", "dir"), f"is that of task {start.source}; give the fork another")


def _secrets(spec: TaskSpec) -> Iterator[FieldFault]:
    for name, source in spec.secrets.items():
        place: Place = ("secrets", name)
        if not _VARIABLE.fullmatch(name):
            yield FieldFault(place, "is not a variable's name; use letters, digits and _")
        elif name.startswith("UNICRON_") or refusal(name):
            yield FieldFault(place, "is a variable that may not be set by a task; use another name")
        elif name in spec.env:
            yield FieldFault(place, "stands in env too; remove it there")
        elif not _SOURCE.fullmatch(source):
            yield FieldFault(
                place, "the value itself would stand in the log; give file:/PATH or env:NAME, which the node has"
            )
