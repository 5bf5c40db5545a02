"""A task file for Megatron-LM, from the command line or the batch script that people have.

Rules
-----
* What follows the script is taken as it is, flag by flag: nothing is translated.
* Of a shell script are read: assignments, arrays, `export`, `cd`, `#SBATCH` sizes, torchrun's sizes, and the first
  command with a Python script that is given flags of a model. Nothing is executed: what only a shell could find out
  (`$(...)`, a variable that is not assigned) is an error that names it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from unicrond.events.megatron.command_line import ENTRY, CommandLine, read_training_flags

#: Variables that change what is computed, or how: they go with the task. Others are the cluster's.
_KEPT = re.compile(r"(CUDA_DEVICE_MAX_CONNECTIONS|OMP_NUM_THREADS|(NCCL|NVTE|TORCH|PYTORCH|CUBLAS)_[A-Z0-9_]+)$")
_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?\}|\$([A-Za-z_]\w*)")
_SIZES = re.compile(r"#SBATCH\s+--?(nodes|N|gpus-per-node|ntasks-per-node|gres)[=\s]+(\S+)")
_ENDS = {"|", "||", "&&", "&", ";", ">", ">>", "2>", "2>&1", "<"}


class BadScript(ValueError):
    """No task can be made of it. One line."""


@dataclass(slots=True)
class Command:
    """`words`: the script and its flags. `workers`: as many as it was run with, 0: not said."""

    words: list[str]
    cwd: str = ""
    env: dict[str, str] = field(default_factory=dict)
    workers: int = 0


def of_words(words: Sequence[str]) -> Command:
    """A command line, a launcher before the script included. Raises BadScript."""
    place = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        raise BadScript("no word ends in .py: give the script of Megatron-LM and its flags behind --")
    rest = list(words[place:])
    for number, word in enumerate(rest):
        if word in _ENDS:
            rest = rest[:number]
            break
    return Command(rest, workers=_launched(words[:place]))


def of_script(text: str) -> Command:
    """A batch script. Raises BadScript."""
    variables: dict[str, list[str]] = {}
    env: dict[str, str] = {}
    cwd = ""
    for line in _lines(text):
        assigned = _ASSIGNED.fullmatch(line)
        if assigned and not _is_prefix(assigned[3]):
            name, more, value = assigned[1], assigned[2], assigned[3]
            words = _value(value, variables)
            variables[name] = [*variables.get(name, []), *words] if more else words
            if _KEPT.match(name) and line.startswith("export") and all("$" not in word for word in words):
                env[name] = " ".join(words)
        elif line.startswith("cd "):
            cwd = " ".join(_value(line[3:], variables))
        elif ".py" in _resolved(line, variables):
            words = _words(_resolved(line, variables))
            if any(word.startswith("--num-layers") for word in words):
                command = of_words(words)
                command.cwd, command.env = cwd, env
                command.workers = _asked(text) or command.workers
                _require_known(command.words)
                return command
    raise BadScript("no command with a .py script and --num-layers was found in it")


def task_file(command: Command, *, name: str = "", here: Path) -> str:
    """YAML. `here`: where relative paths begin. Raises BadFlags."""
    script = PurePosixPath(command.words[0])
    directory = PurePosixPath(command.cwd) if command.cwd else PurePosixPath(here)
    if script.is_absolute() or not command.cwd:
        directory, script = (directory / script).parent, PurePosixPath(script.name)
    words = [str(script), *command.words[1:]]
    told = read_training_flags(CommandLine.parse(words))
    size = told.tp * told.pp
    most = min(command.workers // size or 1, told.global_batch // told.micro_batch) * size
    lines = [
        f"name: {name or script.stem.replace('_', '-')}",
        f"entry: {ENTRY}",
        f"cwd: {json.dumps(str(directory))}",
        f"min_workers: {size}    # one replica: tp {told.tp} x pp {told.pp}",
        f"max_workers: {most}    # as many as it may ever use",
    ]
    if command.env:
        lines += ["env:", *(f"  {key}: {json.dumps(value)}" for key, value in command.env.items())]
    args = (f"  - {json.dumps(word, ensure_ascii=False)}" for word in words)
    return "\n".join([*lines, "args:", *args]) + "\n"


# --- a shell script ------------------------------------------------------------------------------


def _lines(text: str) -> Iterator[str]:
    """Logical lines: continued ones and arrays over several lines joined, comments away."""
    open_array = ""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if open_array:
            open_array += " " + line
            if line.endswith(")"):
                yield open_array
                open_array = ""
        elif re.match(r"(export\s+)?\w+\+?=\(", line) and not line.endswith(")"):
            open_array = line
        elif line:
            yield line


def _is_prefix(value: str) -> bool:
    """`NAME=value command`: not an assignment of its own."""
    if value.startswith("("):
        return False
    try:
        return len(shlex.split(value)) > 1
    except ValueError:
        return False


def _value(text: str, variables: Mapping[str, Sequence[str]]) -> list[str]:
    text = _resolved(text.strip(), variables)
    if text.startswith("(") and text.endswith(")"):
        return _words(text[1:-1])
    return [" ".join(_words(text))] if text else [""]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadScript(f"{text[:80]!r}: {error}") from None


def _resolved(text: str, variables: Mapping[str, Sequence[str]]) -> str:
    """With what was assigned. Quotes around an array fall away: its words stay apart."""

    def replaced(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return " ".join(variables[name]) if name in variables else found[0]

    text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)
    return _VARIABLE.sub(replaced, text)


def _require_known(words: Sequence[str]) -> None:
    for word in words:
        if "$" in word or "`" in word:
            raise BadScript(f"{word!r} is known to a shell alone; write what it stands for, or give the command line")


def _asked(text: str) -> int:
    """GPUs that Slurm was asked for; 0: not said."""
    sizes: dict[str, int] = {}
    for name, value in _SIZES.findall(text):
        number = re.search(r"(\d+)$", value)
        if number:
            sizes[{"N": "nodes", "gres": "gpus-per-node"}.get(name, name)] = int(number[1])
    each = sizes.get("gpus-per-node", sizes.get("ntasks-per-node", 0))
    return sizes.get("nodes", 1) * each


def _launched(words: Sequence[str]) -> int:
    """Processes that torchrun was asked for; 0: not said."""
    given = dict(re.findall(r"--(nnodes|nproc[-_]per[-_]node)[=\s]+(\d+)", " ".join(words)))
    each = next((int(number) for name, number in given.items() if name.startswith("nproc")), 0)
    return int(given.get("nnodes", 1)) * each
