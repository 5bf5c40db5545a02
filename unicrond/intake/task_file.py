"""Task files: YAML -> TaskSpec, or one line that names the file, the line, the field and the fix.

Rules
-----
* A task file means what it says: no unknown field, no key twice, no text where a number belongs.
* Paths (entry, cwd, data, checkpoint.dir) are relative to the file's own directory, and absolute from
  then on: what is sent to the cluster does not depend on where it was sent from.
* What concerns several fields, or more than a field's type, is in `task_rules.py`, for every task, whichever way it
  was submitted; here is added that the entry script is there.

Every field is described in docs/use/task-files.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from events.vocabulary import TaskSpec
from unicrond.core.field_faults import Fault, Place, faults
from unicrond.core.task_rules import BUILT_IN, PATHS, spec_faults
from unicrond.intake.strict_yaml import BadYaml, parse, text_of
from unicrond.intake.throughput_preset import fill, take


class TaskFileError(ValueError):
    """The task cannot be used. The message is one line: file, line, field, what is wrong, the fix."""


def load(path: Path) -> TaskSpec:
    """The task in the file `path`. Raises TaskFileError."""
    return loads(text_of(path, TaskFileError, "check the path"), where=str(path), directory=path.parent)


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
        raise TaskFileError(f"{where}: is empty; the minimum is `name: my-task` (see docs/use/task-files.md)")
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
    for *parents, name in PATHS:
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


def _problems(spec: TaskSpec) -> Iterator[Fault]:
    yield from spec_faults(spec)
    if spec.entry != BUILT_IN and Path(spec.entry).is_absolute() and not Path(spec.entry).is_file():
        yield Fault(("entry",), f"{spec.entry!r} is not a file; give {BUILT_IN} or the path of a script")
