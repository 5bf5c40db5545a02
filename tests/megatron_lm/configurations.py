"""Megatron-LM's own functional configurations: which of them `unicronctl init-megatron` makes a task of, and why the
others are refused; and which have been trained at toy size (`toys.py`).

    python -m tests.megatron_lm.configurations           # prints docs/use/configurations.md
    python -m tests.megatron_lm.configurations --train   # trains what has not been; Ctrl-C, and go on later

The file of configurations lies beside the archives (`fixtures.py`); it is not a part of this project.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.integration.regroup_rig import ForkServer
from tests.megatron_lm import toys
from tests.megatron_lm.fixtures import archives
from unicrond.events.megatron.command_line import BadFlags, CommandLine, read_training_flags, refusals, without_effect
from unicrond.intake.megatron_init import parse_script, task_file
from unicrond.intake.task_file import loads

NAME = "megatron_lm_functional_configs.json"
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_HEAD = """# Megatron-LM's own configurations

Megatron-LM tests itself with {whole} functional configurations. Each was given to `unicronctl
init-megatron --script` as the batch script that it is, its variables assigned: **{taken} make a task; {refused} are
refused**, each by one line that names the flag. {without} are taken with a flag unset, which submission says:
`--fp8-param-gather` and its like save time or memory
([what is without them](megatron-lm.md#what-follows-from-the-flags)).

**{equal} of the {taken} were trained at toy size**: sizes shrunk, degrees of parallelism at most 2, on mock data and a
CPU, in Megatron-LM alone and in a task of two replicas one of which is killed (SIGKILL) in the third iteration. What
both log and the final parameters are equal to 1e-6, or within twice what Megatron-LM differs by from itself on half as
many ranks; but for the parameters' norm with `--bf16 --use-distributed-optimizer` ([why](megatron-lm.md#how-it-works)).
Configurations that come to the same flags then are one toy; {toys} toys were trained ({first} to {last}). Transformer
Engine, fp8 and fused kernels, which {gpu} of the {taken} ask for, need a GPU: their toys are without them. Not trained:
{other_script} whose script or layers are not at hand (T5, BERT, Mamba, multi-latent attention), {waiting} that wait for
their turn, {failed} that did not train alike (below).

`.venv/bin/python -m tests.megatron_lm.configurations` prints this page, with `--train` it trains what waits.

| kind | configurations | taken |
|---|---|---|
"""
_NONE = {"equal": 0, "failed": 0, "waiting": 0, "other_script": 0}
#: Flags that a CPU cannot obey: Transformer Engine's layers are Megatron's default.
_GPU = ("--fp8-format", "--tp-comm-overlap", "--moe-permute-fusion", "--moe-grouped-gemm", "--fp8-recipe")


def configurations() -> list[dict[str, object]]:
    """Return them as they are in the file. Raises FileNotFoundError."""
    folder = archives()
    if folder is None:
        raise FileNotFoundError(f"set MEGATRON_LM_FIXTURES to a folder beside {NAME}")
    parsed: list[dict[str, object]] = json.loads((folder.parent / NAME).read_text())
    return parsed


def with_words() -> Iterator[tuple[str, str, list[str]]]:
    """Yield each one's kind, name and words, the script first. (Of pipeline layouts the file has a shell's escapes.)"""
    for configuration in configurations():
        args = configuration["args"]
        assert isinstance(args, list)
        words = [str(word).replace("\\", "") for word in args]
        yield str(configuration["kind"]), str(configuration["name"]), [str(configuration["script"]), *words]


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
    trained, states, failures = toys.outcomes(), Counter[str](), dict[str, list[str]]()
    for kind, name, words in with_words():
        kinds[kind] += 1
        refused = reasons(words)
        if not refused:
            taken[kind] += 1
            needs_gpu += "transformer_engine" in words or any(flag in words for flag in _GPU)
            without += any(without_effect(CommandLine.parse(words).values))
            toy = toys.toy_of(words)
            outcome = trained.get(toy) if toy else None
            state = "equal" if outcome and outcome.is_equal else "failed" if outcome else "waiting"
            states[state if toy else "other_script"] += 1
            if outcome and not outcome.is_equal:
                failures.setdefault(outcome.verdict, []).append(name)
        for reason in {re.sub(r"(?<!\w)\d+", "N", text) for text in refused}:
            by_reason[reason].append((name, len(refused) == 1))
    whole = sum(kinds.values())
    numbers = {"whole": whole, "taken": sum(taken.values()), "gpu": needs_gpu, "without": without, **_NONE, **states}
    dates = sorted(outcome.date for outcome in trained.values() if outcome.is_equal)
    period = {"toys": len(dates), "first": dates[0], "last": dates[-1]}
    head = _HEAD.format(**numbers, **period, refused=whole - sum(taken.values()))
    lines = [f"| {kind} | {count} | {taken[kind]} |" for kind, count in sorted(kinds.items())]
    return "\n".join([*head.splitlines(), *lines, "", *_refused(by_reason), *_failed(failures)]) + "\n"


def _failed(failures: Mapping[str, Sequence[str]]) -> Iterator[str]:
    if failures:
        yield from ("", "| toy did not train alike because of | configurations |", "|---|---|")
    for verdict, names in sorted(failures.items()):
        yield f"| {verdict.replace('|', ' ')} | {', '.join(f'`{name}`' for name in names)} |"


def _refused(by_reason: dict[str, list[tuple[str, bool]]]) -> Iterator[str]:
    """Yield the table of reasons; a configuration may have several."""
    yield "| refused because of | configurations | for no other reason |"
    yield "|---|---|---|"
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        flag, _, text = reason.partition(": ")
        yield f"| `{flag}`: {text} | {len(names)} | {sum(alone for _, alone in names)} |"


def train(first: int, text: str, timeout_s: float) -> int:
    """Train toys that have not been, those of the most configurations first. `text`: a part of a configuration's name.
    Return the exit status: 1 where one did not train alike."""
    names: dict[toys.Toy, list[str]] = defaultdict(list)
    for _, name, words in with_words():
        if (toy := toys.toy_of(words)) is not None and not reasons(words):
            names[toy].append(name)
    trained = toys.outcomes()
    waiting = [toy for toy in names if toy not in trained and any(text in name for name in names[toy])]
    waiting.sort(key=lambda toy: (-len(names[toy]), toy.flags))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    failures = 0
    with ForkServer() as server, suppress(KeyboardInterrupt):
        for number, toy in enumerate(waiting[:first], start=1):
            print(f"{number} of {len(waiting)}: {', '.join(names[toy])}", end=": ", flush=True)
            outcome = toys.train(toy, server, timeout_s)
            failures += not outcome.is_equal
            print(outcome.verdict, flush=True)
    return int(failures > 0)


def main(argv: Sequence[str]) -> int:
    """Print the page, or train. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.megatron_lm.configurations", description=__doc__)
    parser.add_argument("--train", action="store_true", help="train what has not been trained")
    parser.add_argument("--first", type=int, default=1_000, metavar="N", help="of these the first N")
    parser.add_argument("--only", default="", metavar="TEXT", help="those of a configuration with this in its name")
    parser.add_argument("--timeout-s", type=float, default=280.0, help="of one run (280)")
    options = parser.parse_args(argv)
    if options.train:
        return train(options.first, options.only, options.timeout_s)
    print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
