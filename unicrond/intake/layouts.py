"""`layouts` in a task file: the tp and pp that the plan may give the task (docs/use/task-files.md).

Rules
-----
* `fixed`: its own alone. A list: these, its own among them; `tp` and `pp` of an entry are a number, a list of numbers
  or a range like `1..8`, of which those count that divide the model. `auto`: what the program can be restarted in.
* `auto` is the rule for the built-in GPT and for Megatron-LM, where it is known that its flags can be restarted in
  another layout (`events/megatron_layouts.py`); other programs are `fixed` unless they say otherwise.
* Without a model of its memory `auto` takes no layout in which a worker holds more of the model than in its own, unless
  that is little (SMALL_BYTES); and none of more workers to a replica: nothing says that it would be faster. Of
  Megatron-LM it takes only those in which it is little: flags alone do not tell what a worker holds.
* An entry may say how large a micro-batch is in its layouts; in the others it is as the task says.
* With `throughput_model` each layout has its own table. Those that are the best for no number of workers are left out.
* A layout without a table has that of the task: nothing is known against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from events import megatron_layouts, megatron_lm
from events.vocabulary import LayoutSpec, TaskSpec
from unicrond.core.field_faults import Fault, Place
from unicrond.core.gradient_memory import ELEMENT_BYTES, gradients, parameters
from unicrond.core.planning.placement import Shape
from unicrond.core.task_rules import BUILT_IN, ENTRIES, LAYOUTS_MAX, divides, flag_problem
from unicrond.core.waf import in_layout

FIELD = "layouts"
#: Of a worker's state: as little finds room on any accelerator.
SMALL_BYTES = 2**30
#: BF16 weight, FP32 master and two moments.
_STATE_BYTES = 18
_RANGE = re.compile(r"([1-9][0-9]{0,5})\.\.([1-9][0-9]{0,5})")
#: Tensor-parallel sizes that `auto` tries.
_TP_TRIED = (1, 2, 4, 8, 16)


class Entry(NamedTuple):
    """Of a list. `micro_batch`: 0 where it says nothing of it."""

    tps: list[int]
    pps: list[int]
    table: dict[str, int]
    micro_batch: int = 0

    @property
    def shapes(self) -> list[Shape]:
        """Each tp with each pp."""
        return [Shape(tp, pp) for tp in self.tps for pp in self.pps]


#: "auto", "fixed", or the entries of a list.
Wish = str | list[Entry]


def take(data: Any) -> tuple[Wish, bool, list[Fault]]:
    """Take `layouts` out of a task's data: what is wished, whether the file says so, what is wrong."""
    if not isinstance(data, dict):
        return "fixed", False, []
    if FIELD not in data:
        is_free = data.get("entry", BUILT_IN) in ENTRIES and not _untried(data)
        return ("auto" if is_free else "fixed"), False, []
    given = data.pop(FIELD)
    if given == "auto" and (why := _untried(data)):
        return "fixed", True, [Fault((FIELD,), f"auto, but {why}; give fixed or a list")]
    if given in ("fixed", "auto"):
        return given, True, []
    if not isinstance(given, list | tuple) or not given:
        return "fixed", True, [Fault((FIELD,), "give auto, fixed, or a list like [{tp: 1, pp: 1..4}]")]
    found: list[Fault] = []
    wish = [_entry(entry, (FIELD, n), found) for n, entry in enumerate(given)]
    return wish, True, found


def _untried(data: dict[str, Any]) -> str:
    """Why nobody can say that these flags can be restarted in another layout."""
    args = data.get("args")
    if data.get("entry") != megatron_lm.ENTRY or not isinstance(args, list | tuple):
        return ""
    rules = megatron_layouts.of_args([str(word) for word in args])
    return rules.untried if rules is not None else ""


def _entry(entry: Any, place: Place, found: list[Fault]) -> Entry:
    if not isinstance(entry, dict) or (strange := set(entry) - {"tp", "pp", "throughput", "micro_batch"}):
        named = f"unknown field {min(map(str, strange))}; " if isinstance(entry, dict) else ""
        found.append(Fault(place, f"{named}give tp, pp, micro_batch and throughput, like {{tp: 2, pp: 1}}"))
        return Entry([1], [1], {})
    tps, pps = (_numbers(entry.get(name, 1), (*place, name), found) for name in ("tp", "pp"))
    try:
        table = msgspec.convert(entry.get("throughput", {}), dict[str, int], str_keys=True)
    except msgspec.ValidationError:
        found.append(Fault((*place, "throughput"), "give FLOP/s by workers, like {4: 1.1e12}"))
        table = {}
    if table and len(tps) * len(pps) > 1:
        found.append(Fault((*place, "throughput"), "is of one layout; give tp and pp as one number each"))
    micro_batch = entry.get("micro_batch", 0)
    if "micro_batch" in entry and (type(micro_batch) is not int or not 0 < micro_batch < 2**31):
        found.append(Fault((*place, "micro_batch"), f"{micro_batch!r} is no number of samples; give a number like 2"))
        micro_batch = 0
    return Entry(tps, pps, table, micro_batch)


def _numbers(given: Any, place: Place, found: list[Fault]) -> list[int]:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return [given]
    if isinstance(given, str) and (span := _RANGE.fullmatch(given)) and int(span[1]) <= int(span[2]):
        return list(range(int(span[1]), int(span[2]) + 1))
    if isinstance(given, list) and given and all(type(n) is int and n >= 1 for n in given):
        return list(dict.fromkeys(given))
    found.append(Fault(place, f"{given!r} is no size; give a number, a list like [1, 2, 4], or a range like 1..8"))
    return [1]


def shapes_of(spec: TaskSpec, wish: Wish) -> tuple[list[Shape], list[Fault]]:
    """The layouts that are wished and divide the model, the task's own first."""
    own = Shape(spec.tp, spec.pp)
    if wish == "fixed":
        return [own], []
    shapes, found = [own], []
    if isinstance(wish, str):
        shapes += [shape for shape in _divisors(spec) if shape.workers <= spec.max_workers]
    else:
        for n, entry in enumerate(wish):
            wished = entry.shapes
            fits = [shape for shape in wished if divides(spec, shape) and shape.workers <= spec.max_workers]
            shapes += fits
            if not fits:
                known = (why for shape in wished if (why := flag_problem(spec, shape)))
                why = next(known, f"no tp and pp of this entry divide the model on up to {spec.max_workers} workers")
                text = f"{why}; leave it out"
                found.append(Fault((FIELD, n), text))
    return list(dict.fromkeys(shapes)), found


def micro_batches_of(spec: TaskSpec, wish: Wish) -> tuple[dict[Shape, int], list[Fault]]:
    """Samples of a micro-batch in each layout that an entry of the list names; nothing where none says how many."""
    found: list[Fault] = []
    if isinstance(wish, str) or not any(entry.micro_batch for entry in wish):
        return {}, found
    sizes = {Shape(spec.tp, spec.pp): spec.micro_batch}
    for n, entry in enumerate(wish):
        size = entry.micro_batch or spec.micro_batch
        if spec.global_batch % size:
            text = f"{size} does not divide global_batch ({spec.global_batch}); use a divisor of it"
            found.append(Fault((FIELD, n, "micro_batch"), text))
        other = next((shape for shape in entry.shapes if sizes.setdefault(shape, size) != size), None)
        if other is not None:
            text = f"tp {other.tp}, pp {other.pp} has micro-batches of {sizes[other]} already; give it one size"
            found.append(Fault((FIELD, n, "micro_batch"), text))
    return sizes, found


def _divisors(spec: TaskSpec) -> Iterator[Shape]:
    for tp in _TP_TRIED:
        for pp in range(1, spec.model.layers + 1):
            if divides(spec, Shape(tp, pp)):
                yield Shape(tp, pp)


def filled(spec: TaskSpec, wish: Wish) -> tuple[TaskSpec, list[Fault]]:
    """The task with its layouts, where no model of Megatron is given."""
    shapes, found = shapes_of(spec, wish)
    sizes, wrong = micro_batches_of(spec, wish)
    found = [*found, *wrong]
    tables = {}
    if isinstance(wish, str):
        shapes = [shape for shape in shapes if shape == Shape(spec.tp, spec.pp) or _is_safe(spec, shape)]
    else:
        tables = {entry.shapes[0]: entry.table for entry in wish if entry.table}
    return with_layouts(spec, shapes, tables, sizes), found


def with_layouts(
    spec: TaskSpec, shapes: list[Shape], tables: dict[Shape, dict[str, int]], sizes: Mapping[Shape, int]
) -> TaskSpec:
    """The task with these layouts, its own first; none where that is all."""
    if len(shapes) < 2:
        return spec
    given = spec.throughput or tables.get(Shape(spec.tp, spec.pp), {})
    layouts = [
        LayoutSpec(tp=one.tp, pp=one.pp, throughput=tables.get(one) or given, micro_batch=sizes.get(one, 0))
        for one in shapes[:LAYOUTS_MAX]
    ]
    return replace(spec, layouts=tuple(layouts), throughput=given)


def with_bounds(spec: TaskSpec) -> TaskSpec:
    """A task that leaves its layout to the plan needs no bounds in whole replicas: at least as many workers as its
    smallest replica, or as its tables begin with."""
    layouts = spec.layouts or (LayoutSpec(tp=spec.tp, pp=spec.pp, throughput=spec.throughput),)
    tabled = [int(n) for one in layouts for n, flops in one.throughput.items() if flops and n.isdecimal()]
    fewest = min(tabled, default=min(one.tp * one.pp for one in layouts))
    most, unit = spec.max_workers, spec.replica_workers
    least = max(spec.min_workers, min(fewest, most))
    if not spec.layouts:
        least, most = -(-least // unit) * unit, most // unit * unit or most
    return replace(spec, min_workers=least, max_workers=most)


def _is_safe(spec: TaskSpec, shape: Shape) -> bool:
    """In the layout a worker holds no more than in the task's own, or little; and nothing speaks against its size."""
    if shape.workers > spec.replica_workers:
        return False
    if shape.workers == spec.replica_workers and spec.entry == BUILT_IN:
        return True
    one = in_layout(replace(spec, layouts=(LayoutSpec(tp=shape.tp, pp=shape.pp),)), shape)
    held = _STATE_BYTES + ELEMENT_BYTES * gradients(one, 1).most
    rules = megatron_layouts.of_args(spec.args) if spec.entry == megatron_lm.ENTRY else None
    return parameters(one) * held * (rules.experts if rules is not None else 1) <= SMALL_BYTES
