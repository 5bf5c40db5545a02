"""A task file for Megatron-LM, from the command line or the batch script that people have.

Rules
-----
* The words after the script are copied flag by flag: nothing is translated.
* From a shell script these are read: assignments, arrays, `export`, `cd`, `#SBATCH` sizes, torchrun's sizes, and the
  first command with a Python script and flags of a model. Nothing is executed: an expression that only a shell could
  evaluate (`$(...)`, a variable that is not assigned) is an error that names it.
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
_TASK_VARIABLES = re.compile(
    r"(CUDA_DEVICE_MAX_CONNECTIONS|OMP_NUM_THREADS|(NCCL|NVTE|TORCH|PYTORCH|CUBLAS)_[A-Z0-9_]+)$"
)
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?\}|\$([A-Za-z_]\w*)")
_SIZES = re.compile(r"#SBATCH\s+--?(nodes|N|gpus-per-node|ntasks-per-node|gres)[=\s]+(\S+)")
#: A command with one of these trains a model: of encoders and decoders, or with the sizes of a checkpoint, too.
_TRAINING_FLAGS = ("--num-layers", "--encoder-num-layers", "--micro-batch-size")
_ENDS = {"|", "||", "&&", "&", ";", ">", ">>", "2>", "2>&1", "<"}


class BadScript(ValueError):
    """The input makes no task. One line."""


@dataclass(slots=True)
class LaunchCommand:
    """A training command. `words`: the script and its flags. `workers`: how many it was run with, 0: unknown."""

    words: list[str]
    cwd: str = ""
    env: dict[str, str] = field(default_factory=dict)
    workers: int = 0


def parse_words(words: Sequence[str]) -> LaunchCommand:
    """Parse a command line, a launcher before the script included. Raise BadScript."""
    place = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        raise BadScript("no word ends in .py: give the script of Megatron-LM and its flags behind --")
    rest = list(words[place:])
    for number, word in enumerate(rest):
        if word in _ENDS:
            rest = rest[:number]
            break
    return LaunchCommand(rest, workers=_torchrun_processes(words[:place]))


def parse_script(text: str) -> LaunchCommand:
    """Parse a batch script. Raise BadScript."""
    variables: dict[str, list[str]] = {}
    env: dict[str, str] = {}
    cwd = ""
    for line in _lines(text):
        assigned = _ASSIGNMENT.fullmatch(line)
        if assigned and not _is_prefix(assigned[3]):
            name, more, value = assigned[1], assigned[2], assigned[3]
            words = _value(value, variables)
            variables[name] = [*variables.get(name, []), *words] if more else words
            if _TASK_VARIABLES.match(name) and line.startswith("export") and all("$" not in word for word in words):
                env[name] = " ".join(words)
        elif line.startswith("cd "):
            cwd = " ".join(_value(line[3:], variables))
        elif ".py" in _substitute(line, variables):
            words = _words(_substitute(line, variables))
            if any(word.partition("=")[0] in _TRAINING_FLAGS for word in words):
                command = parse_words(words)
                command.cwd, command.env = cwd, env
                command.workers = _slurm_gpus(text) or command.workers
                _require_known(command.words)
                return command
    raise BadScript(f"no command with a .py script and one of {', '.join(_TRAINING_FLAGS)} was found in it")


def task_file(command: LaunchCommand, *, name: str = "", base: Path) -> str:
    """Return the task file as YAML. `base`: where relative paths begin. Raise BadFlags."""
    script = PurePosixPath(command.words[0])
    directory = PurePosixPath(command.cwd) if command.cwd else PurePosixPath(base)
    if script.is_absolute() or not command.cwd:
        directory, script = (directory / script).parent, PurePosixPath(script.name)
    words = [str(script), *command.words[1:]]
    flags = read_training_flags(CommandLine.parse(words))
    size, replica = flags.shape.workers, " x ".join(f"{name} {degree}" for name, degree in flags.shape.factors.items())
    most = min(command.workers // size or 1, flags.global_batch // (flags.micro_batch * flags.shape.data)) * size
    lines = [
        f"name: {name or script.stem.replace('_', '-')}",
        f"entry: {ENTRY}",
        f"cwd: {json.dumps(str(directory))}",
        f"min_workers: {size}    # one replica: {replica}",
        f"max_workers: {most}    # as many as it may ever use",
    ]
    if command.env:
        lines += ["env:", *(f"  {key}: {json.dumps(value)}" for key, value in command.env.items())]
    args = (f"  - {json.dumps(word, ensure_ascii=False)}" for word in words)
    return "\n".join([*lines, "args:", *args]) + "\n"


# --- a shell script ------------------------------------------------------------------------------


def _lines(text: str) -> Iterator[str]:
    """Yield logical lines: continued ones and arrays over several lines joined, comments removed."""
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
    """Return whether the assignment is the prefix of a command (`NAME=value command`), not one of its own."""
    if value.startswith("("):
        return False
    try:
        return len(shlex.split(value)) > 1
    except ValueError:
        return False


def _value(text: str, variables: Mapping[str, Sequence[str]]) -> list[str]:
    text = _substitute(text.strip(), variables)
    if text.startswith("(") and text.endswith(")"):
        return _words(text[1:-1])
    return [" ".join(_words(text))] if text else [""]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadScript(f"{text[:80]!r}: {error}") from None


def _substitute(text: str, variables: Mapping[str, Sequence[str]]) -> str:
    """Replace the variables that were assigned. Quotes around an array are removed: its words stay apart."""

    def replaced(match: re.Match[str]) -> str:
        """Return the value of the variable, or the text itself if it has none."""
        name = match[1] or match[2]
        return " ".join(variables[name]) if name in variables else match[0]

    text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)
    return _VARIABLE.sub(replaced, text)


def _require_known(words: Sequence[str]) -> None:
    for word in words:
        if "$" in word or "`" in word:
            raise BadScript(f"{word!r} is known to a shell alone; write what it stands for, or give the command line")


def _slurm_gpus(text: str) -> int:
    """Return how many GPUs the script requests of Slurm; 0 if it does not say."""
    sizes: dict[str, int] = {}
    for name, value in _SIZES.findall(text):
        number = re.search(r"(\d+)$", value)
        if number:
            sizes[{"N": "nodes", "gres": "gpus-per-node"}.get(name, name)] = int(number[1])
    per_node = sizes.get("gpus-per-node", sizes.get("ntasks-per-node", 0))
    return sizes.get("nodes", 1) * per_node


def _torchrun_processes(words: Sequence[str]) -> int:
    """Return how many processes torchrun is to start; 0 if the words do not say."""
    options = dict(re.findall(r"--(nnodes|nproc[-_]per[-_]node)[=\s]+(\d+)", " ".join(words)))
    per_node = next((int(number) for name, number in options.items() if name.startswith("nproc")), 0)
    return int(options.get("nnodes", 1)) * per_node
