"""Task files: YAML -> TaskSpec, or one line that names the file, the line, the field and the fix.

Rules
-----
* A task file means what it says: no unknown field, no key twice, no text where a number belongs.
* Paths (entry, cwd, data, checkpoint.dir) are relative to the file's own directory, and absolute from
  then on: what is sent to the cluster does not depend on where it was sent from.
* What may be wrong with a task, however it was submitted, is in core/tasks/task_validation.py; of the disk, this module
  lets it look at the entry script.

Every field is described in docs/use/task-files.md.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from unicrond.core.state.field_faults import FieldFault, Place
from unicrond.core.tasks.task_rules import ENTRIES, PATHS
from unicrond.core.tasks.task_validation import form_problems, task_problems
from unicrond.events.vocabulary import DETERMINISM, DETERMINISTIC, LANES, TaskSpec, TaskStart
from unicrond.events.vocabulary.field_types import StartMode
from unicrond.events.vocabulary.tasks import is_url
from unicrond.intake import layouts, megatron_task
from unicrond.intake.strict_yaml import BadYaml, parse, text_of
from unicrond.intake.throughput_preset import Preset, fill, fill_further_gpus, shorten_tables, take_preset

log = logging.getLogger(__name__)

#: `numerics` in a task file -> `accumulation` on the log.
_ON_THE_LOG = {"fixed": "exact", "follow": "float"}


class TaskFileError(ValueError):
    """The task is invalid. The message is one line: file, line, field, what is wrong, the fix."""


def load(path: Path) -> TaskSpec:
    """Load the task in the file `path`. Raise TaskFileError."""
    return loads(text_of(path, TaskFileError, "check the path"), where=str(path), directory=path.parent)


def loads(text: str, *, where: str = "task file", directory: Path | None = None) -> TaskSpec:
    """Parse the task in `text`. `where` names it in errors; relative paths start at `directory` (default: here).

    Raise TaskFileError.
    """
    try:
        document = parse(text)
    except BadYaml as error:
        raise TaskFileError(f"{where}:{error.line}: {error.reason}") from None
    data = document.value
    if data is None:
        raise TaskFileError(f"{where}: is empty; the minimum is `name: my-task` (see docs/use/task-files.md)")
    if isinstance(data, dict):
        gpus = [layout for gpu in _dicts(data.get("gpus")) for layout in _dicts(gpu.get("layouts"))]
        for part in (data, *_dicts(data.get(layouts.FIELD)), *gpus):
            _whole_numbers(part.get("throughput"))
        _absolute_paths(data, (directory or Path()).absolute())
        if "start" in data:
            fix = "say it with the order, not in the file: unicronctl submit --resume, --restart or --fork NAME"
            raise TaskFileError(f"{where}{_line(document.lines, ('start',))}: start: {fix}")
        accumulation = data.get("accumulation")
        for today, on_the_log in _ON_THE_LOG.items():
            if accumulation == on_the_log:
                place = f"{where}{_line(document.lines, ('accumulation',))}"
                log.warning("%s: accumulation: %s is called numerics: %s now; write that", place, accumulation, today)
    spec, faults = parse_task(data)
    if spec is not None:
        return spec
    first, more = faults[0], len(faults) - 1
    line = _line(document.lines, first.place)
    rest = f" (and {more} more)" if more else ""
    raise TaskFileError(f"{where}{line}: {first}{rest}")


def with_start(spec: TaskSpec, mode: StartMode, *, fork: str, prove: bool, where: str) -> TaskSpec:
    """Return the file's task as a person orders it to begin. `fork`: the name of the task that begins from the newest
    state of the file's, "" for the file's own; `where` names the file in errors. Raise TaskFileError."""
    spec = _fork(spec, fork, where) if fork else spec
    start = replace(spec.start or TaskStart(mode=mode), prove=prove)
    return spec if start == TaskStart() else replace(spec, start=start)


def _fork(spec: TaskSpec, name: str, where: str) -> TaskSpec:
    """Return the fork, whose checkpoints lie beside the task's own. Raise TaskFileError where nothing may."""
    directory = spec.checkpoint.dir
    root, _, path = directory.rpartition("://")  # of an object store: its scheme; else ""
    place = Path("/", os.path.normpath(path))
    if directory and place.parent == place.parent.parent:
        text = f"checkpoint.dir: a fork keeps its states beside those of task {spec.name}: for {directory} in the root"
        raise TaskFileError(f"{where}: {text}; give one in it for the fork, such as {directory}/{spec.name}")
    beside = str(place.with_name(name)) if directory else ""
    return replace(
        spec,
        name=name,
        checkpoint=replace(spec.checkpoint, dir=f"{root}:/{beside}" if root else beside),
        start=TaskStart(mode="fork", source=spec.name, source_dir=directory),
    )


def parse_task(data: Any) -> tuple[TaskSpec | None, list[FieldFault]]:
    """Return the task that plain data (of YAML or JSON) describes, `throughput_model` filled in, or None; and all
    faults."""
    preset: Preset | None = None
    wish, is_asked, task_faults = layouts.take(data)
    if isinstance(data, dict):
        preset, wrong = take_preset(data)
        task_faults += [*wrong, *_numerics(data), *_deterministic(data), *megatron_task.take(data)]
    task_faults += form_problems(data)
    if task_faults:
        return None, task_faults
    spec = layouts.fill_gpu_layouts(msgspec.convert(data, TaskSpec, strict=True), data)
    spec = replace(spec, etp=spec.cut.etp)
    task_faults = [] if is_asked and wish != "fixed" else task_problems(spec, is_file=is_file)
    if task_faults:
        return None, task_faults
    if spec.lanes and not is_asked:  # a file without `layouts` gets the sums of the task's own layout
        spec = replace(spec, env={**spec.env, LANES: str(spec.lanes)})
    if preset is None:
        spec, task_faults = layouts.fill_layouts(spec, wish)
    else:
        shapes, task_faults = layouts.shapes_of(spec, wish, modelled=True)
        if not task_faults:
            is_free = is_asked and wish != "fixed" and not {"tp", "pp"} & set(data)
            spec, task_faults = fill(spec, preset, shapes, is_free=is_free)
            spec = shorten_tables(fill_further_gpus(spec, preset) if preset.also else spec) if not task_faults else spec
    spec = layouts.with_bounds(spec) if is_asked and wish != "fixed" and not task_faults else spec
    task_faults = task_faults or task_problems(spec, is_file=is_file)
    if not task_faults and spec.lanes:
        spec = replace(spec, env={**spec.env, LANES: str(spec.lanes)})
    return (None, task_faults) if task_faults else (spec, [])


# --- from the file -------------------------------------------------------------------------------


def _dicts(listed: Any) -> list[dict[str, Any]]:
    return [part for part in listed if isinstance(part, dict)] if isinstance(listed, list) else []


def _whole_numbers(table: Any) -> None:
    """Convert whole floats to integers: 1.9e12 is how people write FLOP/s, and the log holds integers."""
    if isinstance(table, dict):
        for key, value in table.items():
            if isinstance(value, float) and value.is_integer():
                table[key] = int(value)


def _numerics(data: dict[str, Any]) -> list[FieldFault]:
    """Convert `numerics` to `accumulation`, its name on the log; without either the sum is fixed. (The number of lanes
    that this fixes for good is noted in the task's environment.)"""
    if "numerics" not in data:
        data.setdefault("accumulation", _ON_THE_LOG["fixed"])
        return []
    numerics = data.pop("numerics")
    if numerics not in _ON_THE_LOG:
        return [FieldFault(("numerics",), f"{numerics!r} is not one of fixed, follow")]
    if "accumulation" in data:
        return [FieldFault(("numerics",), "and accumulation are both given; keep numerics")]
    data["accumulation"] = _ON_THE_LOG[numerics]
    return []


def _deterministic(data: dict[str, Any]) -> list[FieldFault]:
    """Move `deterministic` to the task's environment."""
    if "deterministic" not in data:
        return []
    choice, env = data.pop("deterministic"), data.setdefault("env", {})
    if choice not in DETERMINISM:
        return [FieldFault(("deterministic",), f"{choice!r} is not one of {', '.join(DETERMINISM)}")]
    if isinstance(env, dict) and env.setdefault(DETERMINISTIC, choice) != choice:
        return [FieldFault(("deterministic",), f"and env.{DETERMINISTIC} contradict each other; keep one")]
    return []


def _absolute_paths(data: dict[str, Any], directory: Path) -> None:
    for *parents, name in PATHS:
        part: Any = data
        for parent in parents:
            part = part.get(parent) if isinstance(part, dict) else None
        value = part.get(name) if isinstance(part, dict) else None
        if isinstance(value, str) and value and not (name == "entry" and value in ENTRIES) and not is_url(value):
            part[name] = str(directory / Path(value).expanduser())


def _line(lines: dict[Place, int], place: Place) -> str:
    """Return a colon and the line of the place, or of its nearest parent that has a line; "" if none has."""
    while place:
        if place in lines:
            return f":{lines[place]}"
        place = place[:-1]
    return ""


def is_file(path: str) -> bool:
    """Return whether the path is a file of this machine."""
    return Path(path).is_file()
