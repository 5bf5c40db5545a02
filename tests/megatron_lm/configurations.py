"""Megatron-LM's own functional configurations: which of them `unicronctl init-megatron` makes a task of, and why the
others are refused. `python -m tests.megatron_lm.configurations` prints docs/use/configurations.md.

The file of configurations lies beside the archives (`fixtures.py`); it is not a part of this project.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.megatron_lm.fixtures import archives
from unicrond.events.megatron.command_line import BadFlags, CommandLine, read_training_flags, refusals, without_effect
from unicrond.intake.megatron_init import parse_script, task_file
from unicrond.intake.task_file import loads

NAME = "megatron_lm_functional_configs.json"
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_HEAD = """# Megatron-LM's own configurations

Megatron-LM tests itself with {whole} functional configurations. Each was given to `unicronctl
init-megatron --script` as the batch script that it is, its variables assigned: **{taken} make a task; {refused} are
refused**, each by one line that names the flag. What is taken is checked, not trained: the
[list of what was trained](megatron-lm.md#what-works) is that page's. Transformer Engine, fp8 and fused kernels, which
{gpu} of the {taken} ask for, need a GPU and were not trained here. {without} are taken with a flag unset, which
submission says: `--fp8-param-gather` and its like save time or memory
([what is without them](megatron-lm.md#what-follows-from-the-flags)).

`.venv/bin/python -m tests.megatron_lm.configurations` prints this page.

| kind | configurations | taken |
|---|---|---|
"""
#: Flags that a CPU cannot obey: Transformer Engine's layers are Megatron's default.
_GPU = ("--fp8-format", "--tp-comm-overlap", "--moe-permute-fusion", "--moe-grouped-gemm", "--fp8-recipe")


def configurations() -> list[dict[str, object]]:
    """Return them as they are in the file. Raises FileNotFoundError."""
    folder = archives()
    if folder is None:
        raise FileNotFoundError(f"set MEGATRON_LM_FIXTURES to a folder beside {NAME}")
    parsed: list[dict[str, object]] = json.loads((folder.parent / NAME).read_text())
    return parsed


def script(words: Sequence[str]) -> str:
    """Return a batch script of one command. Numbers of repeats are 1; all other variables are folders."""
    names = sorted(set(_VARIABLE.findall(" ".join(words))))
    values = [f"{name}={1 if name == 'REPEAT' else f'/data/{name.lower()}'}" for name in names]
    return "\n".join([*values, "torchrun --nproc-per-node 8 " + " ".join(map(_quoted, words)), ""])


def _quoted(word: str) -> str:
    return f'"{word}"' if _VARIABLE.search(word) else shlex.quote(word)


def reasons(words: Sequence[str]) -> list[str]:
    """Return why it makes no task; none where it does."""
    try:
        loads(task_file(parse_script(script(words)), base=Path("/opt/Megatron-LM")))
    except BadFlags as error:
        line = CommandLine.parse(words)
        flags, refused = line.flags, list(refusals(line.values))
        names = {reason.partition(":")[0] for reason in refused}
        try:  # what would be said without these
            read_training_flags(CommandLine(words[0], {flag: flags[flag] for flag in flags if flag not in names}))
        except BadFlags as other:
            refused.append(str(other))
        return refused or [str(error)]
    return []


def page() -> str:
    """Return the page."""
    kinds, taken, by_reason = Counter[str](), Counter[str](), defaultdict[str, list[tuple[str, bool]]](list)
    needs_gpu = without = 0
    for configuration in configurations():
        args, kind, name = configuration["args"], str(configuration["kind"]), str(configuration["name"])
        assert isinstance(args, list)
        # (Of pipeline layouts the file has the escapes of a shell.)
        words = [str(configuration["script"]), *(str(word).replace("\\", "") for word in args)]
        kinds[kind] += 1
        refused = reasons(words)
        if not refused:
            taken[kind] += 1
            needs_gpu += "transformer_engine" in words or any(flag in words for flag in _GPU)
            without += any(without_effect(CommandLine.parse(words).values))
        for reason in {re.sub(r"(?<!\w)\d+", "N", text) for text in refused}:
            by_reason[reason].append((name, len(refused) == 1))
    whole = sum(kinds.values())
    numbers = {"whole": whole, "taken": sum(taken.values()), "gpu": needs_gpu, "without": without}
    head = _HEAD.format(**numbers, refused=whole - sum(taken.values()))
    lines = [f"| {kind} | {count} | {taken[kind]} |" for kind, count in sorted(kinds.items())]
    return "\n".join([*head.splitlines(), *lines, "", *_refused(by_reason)]) + "\n"


def _refused(by_reason: dict[str, list[tuple[str, bool]]]) -> Iterator[str]:
    """Yield the table of reasons; a configuration may have several."""
    yield "| refused because of | configurations | for no other reason |"
    yield "|---|---|---|"
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        flag, _, text = reason.partition(": ")
        yield f"| `{flag}`: {text} | {len(names)} | {sum(alone for _, alone in names)} |"


if __name__ == "__main__":
    print(page(), end="")
