"""Task files: YAML -> TaskSpec, or one line that names the file, the line, the field and the fix.

Rules
-----
* A task file means what it says: no unknown field, no key twice, no text where a number belongs.
* Paths (entry, cwd, data, checkpoint.dir) are relative to the file's own directory, and absolute from
  then on: what is sent to the cluster does not depend on where it was sent from.
* `problems` checks what concerns several fields, or more than a field's type, and does so for every
  task, whichever way it was submitted. What it lets pass, the planner and the log can carry.

Every field is described in docs/task-file.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from events.codec import MAX_EVENT_BYTES
from events.vocabulary import TaskSpec
from unicrond.faults import Fault, faults
from unicrond.strict_yaml import BadYaml, Place, parse
from unicrond.throughput_preset import fill, take
from unicrond.work import LINEAR_FLOPS

#: The built-in GPT pretraining.
BUILT_IN = "gpt"
#: A spec travels inside commands, and is not to fill them.
SPEC_BYTES_MAX = 64 * 1024
#: A name up to this long is not worth shortening.
SHORT_NAME = 12
#: Weighted FLOP/s of one task: half of what a plan's integers hold (63 bits).
WAF_MAX = 2**62
_PATHS: tuple[Place, ...] = (("entry",), ("cwd",), ("data",), ("checkpoint", "dir"))


class TaskFileError(ValueError):
    """The task cannot be used. The message is one line: file, line, field, what is wrong, the fix."""


def load(path: Path) -> TaskSpec:
    """The task in the file `path`. Raises TaskFileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskFileError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise TaskFileError(f"{path}: is not UTF-8 text; give a YAML file") from None
    return loads(text, where=str(path), directory=path.parent)


def loads(text: str, *, where: str = "task file", directory: Path | None = None) -> TaskSpec:
    """The task in `text`. `where` names it in errors; relative paths start at `directory` (default: here).

    Raises TaskFileError.
    """
    try:
        document = parse(text)
    except BadYaml as error:
        raise TaskFileError(f"{where}:{error.line}: {error.what}") from None
    data = document.value
    if data is None:
        raise TaskFileError(f"{where}: is empty; the least is `name: my-task` (see docs/task-file.md)")
    if isinstance(data, dict):
        _whole_numbers(data.get("throughput"))
        _absolute_paths(data, (directory or Path()).absolute())
    spec, found = understood(data)
    if spec is not None:
        return spec
    first, more = found[0], len(found) - 1
    line = _line(document.lines, first.place)
    rest = f" (and {more} more)" if more else ""
    raise TaskFileError(f"{where}{line}: {first}{rest}")


def understood(data: Any) -> tuple[TaskSpec | None, list[Fault]]:
    """The task that plain data (of YAML or JSON) describes, `throughput_model` filled in; or all that is wrong."""
    preset, found = take(data) if isinstance(data, dict) else (None, [])
    found += faults(data, TaskSpec)
    if found:
        return None, found
    spec = msgspec.convert(data, TaskSpec, strict=True)
    found = list(_problems(spec))
    if preset is not None and not found:
        spec, found = fill(spec, preset)
        found += _problems(spec) if not found else []
    return (None, found) if found else (spec, [])


def problems(spec: TaskSpec) -> list[str]:
    """What is wrong with a well-typed spec, as "field: what is wrong; the fix"; empty where nothing is.

    Looks at the disk for the entry script, and at nothing else outside the spec.
    """
    return [str(problem) for problem in _problems(spec)]


# --- from the file -------------------------------------------------------------------------------


def _whole_numbers(table: Any) -> None:
    """1.9e12 is how people write FLOP/s; the log holds integers."""
    if isinstance(table, dict):
        for key, value in table.items():
            if isinstance(value, float) and value.is_integer():
                table[key] = int(value)


def _absolute_paths(data: dict[str, Any], directory: Path) -> None:
    for *parents, name in _PATHS:
        part: Any = data
        for parent in parents:
            part = part.get(parent) if isinstance(part, dict) else None
        value = part.get(name) if isinstance(part, dict) else None
        if isinstance(value, str) and value and (name, value) != ("entry", BUILT_IN):
            part[name] = str(directory / Path(value).expanduser())


def _line(lines: dict[Place, int], place: Place) -> str:
    """A colon and the line of what stands there, or of its nearest parent; nothing for what stands nowhere."""
    while place:
        if place in lines:
            return f":{lines[place]}"
        place = place[:-1]
    return ""


# --- what concerns more than one field's type ----------------------------------------------------


def _problems(spec: TaskSpec) -> Iterator[Fault]:
    yield from _not_finite(spec)
    yield from _workers(spec)
    yield from _batches(spec)
    yield from _shape(spec)
    yield from _worth(spec)
    yield from _schedule(spec)
    yield from _program(spec)
    size_bytes = len(msgspec.msgpack.encode(spec))
    if size_bytes > SPEC_BYTES_MAX:
        yield Fault((), f"the task is {size_bytes} bytes long, more than {SPEC_BYTES_MAX}; shorten args, env or tables")


def _not_finite(part: msgspec.Struct, place: Place = ()) -> Iterator[Fault]:
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, msgspec.Struct):
            yield from _not_finite(value, (*place, name))
        elif isinstance(value, float) and not math.isfinite(value):
            yield Fault((*place, name), f"{value} is no usable number; give a finite one")


def _workers(spec: TaskSpec) -> Iterator[Fault]:
    unit = spec.replica_workers
    if spec.min_workers > spec.max_workers:
        yield Fault(("min_workers",), f"{spec.min_workers} is more than max_workers ({spec.max_workers}); lower it")
    if spec.max_workers > (most := _membership_max(spec.name)):
        fix = "lower it, or shorten the name" if len(spec.name) > SHORT_NAME else "lower it"
        yield Fault(("max_workers",), f"the membership of more than {most} workers does not fit into one event; {fix}")
    for name in ("min_workers", "max_workers"):
        value = getattr(spec, name)
        if value % unit:
            near = " or ".join(str(n) for n in (value // unit * unit, (value // unit + 1) * unit) if n)
            yield Fault((name,), f"{value} is no multiple of tp * pp = {spec.tp} * {spec.pp}; use {near}")


def _membership_max(name: str) -> int:
    """How many workers of the task fit into one SetMembership, all of them joiners, on nodes with the longest names."""
    worker_bytes = len(name) + len(".123456789") + 2
    member_bytes = worker_bytes + len("worker") + len("node") + len("replica") + len("shard") + 5 + 65 + 2 * 5
    return (MAX_EVENT_BYTES - SPEC_BYTES_MAX) // (member_bytes + worker_bytes)


def _batches(spec: TaskSpec) -> Iterator[Fault]:
    if spec.global_batch % spec.micro_batch:
        yield Fault(
            ("global_batch",),
            f"{spec.global_batch} is no multiple of micro_batch ({spec.micro_batch});"
            f" use {_multiples(spec.global_batch, spec.micro_batch)}",
        )
        return
    replicas = spec.max_workers // spec.replica_workers
    if replicas > spec.micro_batches:
        yield Fault(
            ("max_workers",),
            f"{replicas} replicas share {spec.micro_batches} micro-batches, so some would idle;"
            f" use at most {spec.micro_batches * spec.replica_workers}, or a larger global_batch",
        )


def _shape(spec: TaskSpec) -> Iterator[Fault]:
    """Of the built-in GPT: what Megatron-core asserts when it builds the model."""
    if spec.entry != BUILT_IN:
        return
    model = spec.model
    if model.hidden % model.heads:
        yield Fault(
            ("model", "hidden"),
            f"{model.hidden} does not divide among heads ({model.heads}); use {_multiples(model.hidden, model.heads)}",
        )
    for name in ("heads", "hidden", "vocab"):
        value = getattr(model, name)
        if value % spec.tp:
            yield Fault(
                ("model", name),
                f"{value} does not divide among tp ({spec.tp}); use {_multiples(value, spec.tp)}, or another tp",
            )
    if model.layers % spec.pp:
        yield Fault(
            ("model", "layers"),
            f"{model.layers} does not divide among pp ({spec.pp});"
            f" use {_multiples(model.layers, spec.pp)}, or another pp",
        )


def _multiples(value: int, unit: int) -> str:
    """The multiples of `unit` beside `value`, as words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _worth(spec: TaskSpec) -> Iterator[Fault]:
    table = spec.throughput
    for key in table:
        if not re.fullmatch(r"[1-9][0-9]{0,8}", key) or int(key) > spec.max_workers:
            yield Fault(("throughput", key), f"must be a number of workers, 1 to max_workers ({spec.max_workers})")
            return
    best = max(table.values()) if table else spec.max_workers * LINEAR_FLOPS
    if not math.isfinite(spec.weight):
        return
    if not best:
        yield Fault(("throughput",), "every entry is 0, so the task would never run; give measured FLOP/s")
    elif int(spec.weight * best) < 1:
        yield Fault(("weight",), f"{spec.weight:g} makes the task worth nothing beside others; raise it")
    elif int(spec.weight * best) > WAF_MAX:
        yield Fault(("weight",), f"{spec.weight:g} * {best:.3g} FLOP/s is more than the planner can add up; lower it")


def _schedule(spec: TaskSpec) -> Iterator[Fault]:
    optimizer = spec.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Fault(("optimizer", "min_lr"), f"{optimizer.min_lr:g} is more than lr ({optimizer.lr:g}); lower it")
    name = "iterations" if optimizer.decay_iterations is None else "decay_iterations"
    decay = optimizer.decay_iterations or spec.iterations
    if optimizer.warmup_iterations >= decay:
        yield Fault(
            ("optimizer", "warmup_iterations"),
            f"{optimizer.warmup_iterations} leaves nothing of {name} ({decay}); use less than {decay}",
        )


def _program(spec: TaskSpec) -> Iterator[Fault]:
    for place in _PATHS:
        value: Any = spec
        for name in place:
            value = getattr(value, str(name))
        if value and not Path(value).is_absolute() and (place, value) != (("entry",), BUILT_IN):
            choice = f"; give {BUILT_IN} or an absolute path" if place == ("entry",) else "; give an absolute path"
            yield Fault(place, f"{value!r} is a relative path, and nodes have other directories{choice}")
        elif place == ("entry",) and value != BUILT_IN and not Path(value).is_file():
            yield Fault(place, f"{value!r} is no file; give {BUILT_IN} or the path of a script")
    if spec.entry == BUILT_IN and spec.args:
        yield Fault(("args",), f"entry {BUILT_IN} takes none; remove them, or name a script as entry")
    for name, text in spec.env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Fault(("env", name), "is no variable's name; use letters, digits and _")
        elif "\0" in text:
            yield Fault(("env", name), "holds a NUL character; remove it")
