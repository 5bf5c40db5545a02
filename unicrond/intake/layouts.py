"""`layouts` in a task file: the layouts that the plan may give the task (docs/use/task-files.md).

Rules
-----
* `fixed`: its own alone. A list: these, its own among them; the sizes of an entry (`tp`, `pp`, `micro_batch` and so on)
  are a number, a list of numbers or a range like `1..8`, of which only those count that divide the model. An entry
  without vpp, ep, etp or cp has the nearest to the task's. `auto`: all layouts in which the program can be restarted.
* `auto` is the default for the built-in GPT and for Megatron-LM, where its flags are known to allow a restart in
  another layout (`events/megatron/layouts.py`); for other programs it is `fixed`.
* Without a model of its memory `auto` takes no layout in which a worker holds more of the model than in its own, unless
  that is little (SMALL_BYTES); and none with more workers in a replica: nothing shows that it would be faster. For
  Megatron-LM it takes only those in which it is little: flags alone do not show what a worker holds.
* An entry may set the size of micro-batches in its layouts; in the others it is the task's. `auto` does not change
  it: gradients are grouped by micro-batches.
* With `throughput_model` each layout has its own table, so that `auto` tries all numbers of chunks of a stage that the
  program can have. Those that are the best for no number of workers are left out.
* A layout without a table has that of the task: nothing is known against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product, repeat
from math import prod
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from unicrond.core.state.field_faults import FieldFault, Place
from unicrond.core.tasks.task_rules import (
    BUILT_IN,
    ENTRIES,
    LAYOUTS_MAX,
    cut_problem,
    divides,
    flag_rules,
    nearest,
    with_degrees,
)
from unicrond.core.worth.gradient_memory import ELEMENT_BYTES, gradients, parameters
from unicrond.core.worth.waf import in_layout
from unicrond.events.megatron import command_line as megatron_lm
from unicrond.events.megatron import layouts as megatron_layouts
from unicrond.events.vocabulary import LayoutSpec, TaskSpec
from unicrond.events.vocabulary.shape import Shape

FIELD = "layouts"
#: The size of a worker's state that finds room on any accelerator.
SMALL_BYTES = 2**30
#: BF16 weight, FP32 master and two moments.
_STATE_BYTES = 18
#: Chunks of a stage that `auto` tries with a model.
CHUNKS_MAX = 12
_SIZE_MAX = 999_999
#: The most layouts of one entry that are tried for those that divide the model.
_TRIED_MAX = 20_000
_RANGE = re.compile(r"([1-9][0-9]{0,5})\.\.([1-9][0-9]{0,5})")
#: Tensor-parallel sizes that `auto` tries.
_TP_TRIED = (1, 2, 4, 8, 16)


class LayoutEntry(NamedTuple):
    """An entry of a list: its sizes, by the names of a layout's. Of tp and pp that it does not give: 1; of
    `micro_batch`: the task's; of others: the nearest to the task's."""

    sizes: dict[str, list[int]]
    table: dict[str, int]

    @property
    def micro_batches(self) -> list[int]:
        """Return the sizes of micro-batches, none where it gives none."""
        return self.sizes.get("micro_batch", [])

    def shapes(self, spec: TaskSpec) -> list[Shape]:
        """Return the shapes of all combinations of the degrees."""
        nears = (nearest(spec, tp, pp) for tp, pp in product(self.sizes.get("tp", [1]), self.sizes.get("pp", [1])))
        return [
            with_degrees(near, dict(zip(self.sizes, sizes, strict=True)))
            for near in nears
            for sizes in product(*(self.sizes[name] if name not in ("tp", "pp") else [0] for name in self.sizes))
        ]


#: "auto", "fixed", or the entries of a list.
LayoutChoice = str | list[LayoutEntry]


def take(data: Any) -> tuple[LayoutChoice, bool, list[FieldFault]]:
    """Take `layouts` out of a task's data. Return the choice, whether the file has one, and the faults."""
    if not isinstance(data, dict):
        return "fixed", False, []
    if FIELD not in data:
        is_free = data.get("entry", BUILT_IN) in ENTRIES and not _untried_reason(data)
        return ("auto" if is_free else "fixed"), False, []
    choice = data.pop(FIELD)
    if choice == "auto" and (obstacle := _untried_reason(data)):
        return "fixed", True, [FieldFault((FIELD,), f"auto, but {obstacle}; give fixed or a list")]
    if choice in ("fixed", "auto"):
        return choice, True, []
    if not isinstance(choice, list | tuple) or not choice:
        return "fixed", True, [FieldFault((FIELD,), "give auto, fixed, or a list like [{tp: 1, pp: 1..4}]")]
    faults: list[FieldFault] = []
    wish = [_entry(entry, (FIELD, n), faults) for n, entry in enumerate(choice)]
    return wish, True, faults


def _untried_reason(data: dict[str, Any]) -> str:
    """Return why it is unknown whether these flags can be restarted in another layout; "" if it is known."""
    args = data.get("args")
    if data.get("entry") != megatron_lm.ENTRY or not isinstance(args, list | tuple):
        return ""
    rules = megatron_layouts.layout_rules([str(word) for word in args])
    return rules.untried if rules is not None else ""


def _entry(entry: Any, place: Place, faults: list[FieldFault]) -> LayoutEntry:
    if not isinstance(entry, dict) or (strange := set(entry) - {*Shape._fields, "throughput"}):
        unknown = f"unknown field {min(map(str, strange))}; " if isinstance(entry, dict) else ""
        text = "give tp, pp, vpp, ep, cp, etp, micro_batch and throughput, like {tp: 2, pp: 1}"
        faults.append(FieldFault(place, unknown + text))
        return LayoutEntry({}, {})
    sizes = {name: _numbers(entry[name], (*place, name), faults) for name in Shape._fields if name in entry}
    try:
        table = msgspec.convert(entry.get("throughput", {}), dict[str, int], str_keys=True)
    except msgspec.ValidationError:
        faults.append(FieldFault((*place, "throughput"), "give FLOP/s by workers, like {4: 1.1e12}"))
        table = {}
    if (many := prod(map(len, sizes.values()))) > _TRIED_MAX:
        faults.append(FieldFault(place, f"comes to {many} layouts; give narrower ranges"))
    if table and many > 1:
        faults.append(FieldFault((*place, "throughput"), "is of one layout; give its sizes as one number each"))
    return LayoutEntry(sizes, table)


def _numbers(sizes: Any, place: Place, faults: list[FieldFault]) -> list[int]:
    if type(sizes) is int and 1 <= sizes <= _SIZE_MAX:
        return [sizes]
    if isinstance(sizes, str) and (span := _RANGE.fullmatch(sizes)) and int(span[1]) <= int(span[2]):
        return list(range(int(span[1]), int(span[2]) + 1))
    if isinstance(sizes, list) and sizes and all(type(n) is int and 1 <= n <= _SIZE_MAX for n in sizes):
        return list(dict.fromkeys(sizes))
    fix = "give a number, a list like [1, 2, 4], or a range like 1..8"
    if sizes == 0 and place[-1] == "etp":  # which the task itself may say
        fix = "leave it out where experts are cut as usual, or give the number of parts"
    faults.append(FieldFault(place, f"{sizes!r} is not a size; {fix}"))
    return [1]


def shapes_of(spec: TaskSpec, wish: LayoutChoice, *, modelled: bool = False) -> tuple[list[Shape], list[FieldFault]]:
    """Return the chosen layouts that divide the model, the task's own first, and the faults. `modelled`: each will have
    its own table."""
    if isinstance(wish, str):
        candidates = _divisors(spec, modelled=modelled) if wish == "auto" else ()
        return list(
            dict.fromkeys([spec.cut, *(option for option in candidates if option.workers <= spec.max_workers)])
        ), []
    varied = any(entry.micro_batches for entry in wish)
    shapes, faults = [spec.cut], []
    for n, entry in enumerate(wish):
        entry_shapes = entry.shapes(spec)
        fits = [shape for shape in entry_shapes if divides(spec, shape) and shape.workers <= spec.max_workers]
        shapes += fits
        if not fits:
            reasons = (reason for shape in entry_shapes if (reason := cut_problem(spec, shape)))
            no_size = f"none of its sizes divide the model on up to {spec.max_workers} workers; leave it out"
            faults.append(FieldFault((FIELD, n), next(reasons, no_size)))
        for size in entry.micro_batches:
            if spec.global_batch % size:
                text = f"{size} does not divide global_batch ({spec.global_batch}); use a divisor of it"
                faults.append(FieldFault((FIELD, n, "micro_batch"), text))
    if varied:  # then each says how large its own are
        shapes = [shape._replace(micro_batch=shape.micro_batch or spec.micro_batch) for shape in shapes]
    shapes = list(dict.fromkeys(shapes))
    if len(shapes) > LAYOUTS_MAX and not modelled:
        faults.append(FieldFault((FIELD,), f"are {len(shapes)}, more than {LAYOUTS_MAX}; give fewer"))
    return shapes, faults


def _divisors(spec: TaskSpec, *, modelled: bool) -> Iterator[Shape]:
    """Yield the layouts that divide the model. `modelled`: with all numbers of chunks of a stage; else the nearest to
    the task's, of which as much is known."""
    rules = flag_rules(spec)
    for tp, pp in product(_TP_TRIED, range(1, spec.model.layers + 1)):
        near = nearest(spec, tp, pp)
        chunks = range(1, CHUNKS_MAX + 1) if modelled and rules is not None else ()
        for shape in dict.fromkeys([near, *(near._replace(vpp=vpp) for vpp in chunks)]):
            if divides(spec, shape):
                yield shape


def fill_layouts(spec: TaskSpec, wish: LayoutChoice) -> tuple[TaskSpec, list[FieldFault]]:
    """Return the task with its layouts, where no model of Megatron is given, and the faults."""
    shapes, faults = shapes_of(spec, wish)
    tables = {}
    if isinstance(wish, str):
        shapes = [shape for shape in shapes if shape == spec.cut or _is_safe(spec, shape)]
    else:
        usual = spec.micro_batch if shapes[0].micro_batch else 0
        tables_by_shape = ((shape, entry.table) for entry in wish if entry.table for shape in entry.shapes(spec))
        tables = {shape._replace(micro_batch=shape.micro_batch or usual): table for shape, table in tables_by_shape}
    return with_layouts(spec, shapes, tables), faults


def with_layouts(spec: TaskSpec, shapes: list[Shape], tables: Mapping[Shape, dict[str, int]]) -> TaskSpec:
    """Return the task with these layouts, its own first; with none if it is the only one."""
    if len(shapes) < 2:
        return spec
    own_table = spec.throughput or tables.get(shapes[0], {})
    layouts = [
        LayoutSpec(**shape._asdict(), throughput=tables.get(shape) or own_table) for shape in shapes[:LAYOUTS_MAX]
    ]
    return replace(spec, layouts=tuple(layouts), throughput=own_table)


def fill_gpu_layouts(spec: TaskSpec, data: Mapping[str, Any]) -> TaskSpec:
    """Return the task with the degrees that an entry of `gpus` leaves out filled in, as in `layouts`."""
    gpus = [
        replace(gpu, layouts=tuple(map(_with_degrees, repeat(spec), entry.get("layouts", ()), gpu.layouts)))
        for entry, gpu in zip(data.get("gpus", ()), spec.gpus, strict=True)
    ]
    return replace(spec, gpus=tuple(gpus))


def _with_degrees(spec: TaskSpec, entry: Mapping[str, Any], layout: LayoutSpec) -> LayoutSpec:
    sizes = {name: entry[name] for name in Shape._fields if name in entry}
    return replace(layout, **with_degrees(nearest(spec, layout.tp, layout.pp), sizes)._asdict())


def with_bounds(spec: TaskSpec) -> TaskSpec:
    """Return the task with bounds that suit all its layouts. A task that leaves its layout to the plan needs no bounds
    in whole replicas: at least as many workers as its smallest replica, or as its tables begin with."""
    layouts = spec.layouts or (LayoutSpec(**spec.cut._asdict(), throughput=spec.throughput),)
    tabled = [int(n) for layout in layouts for n, flops in layout.throughput.items() if flops and n.isdecimal()]
    fewest = min(tabled, default=min(layout.shape.workers for layout in layouts))
    most, unit = spec.max_workers, spec.replica_workers
    least = max(spec.min_workers, min(fewest, most))
    if not spec.layouts:
        least, most = -(-least // unit) * unit, most // unit * unit or most
    return replace(spec, min_workers=least, max_workers=most)


def _is_safe(spec: TaskSpec, shape: Shape) -> bool:
    """Return whether a worker holds no more in the layout than in the task's own, or little, and nothing speaks against
    its size."""
    if shape.workers > spec.replica_workers:
        return False
    if shape.workers == spec.replica_workers and spec.entry == BUILT_IN:
        return True
    task = in_layout(replace(spec, layouts=(LayoutSpec(**shape._asdict()),)), shape)
    worker_bytes = _STATE_BYTES + ELEMENT_BYTES * gradients(task, 1).most
    rules = flag_rules(spec)
    return parameters(task) * worker_bytes * (rules.experts if rules is not None else 1) <= SMALL_BYTES
