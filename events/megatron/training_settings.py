"""The settings of a task that decide what is trained, by name: by them two runs of one name are compared.

Rules
-----
* What may differ without another training is left out: iterations, layout, size, worth, places, the environment.
* Of a script's own arguments nobody knows the meaning: all count. Of Megatron-LM's flags all count but those that only
  log, save, evaluate, place or speed up (`_NEUTRAL`).
* Secrets are left out, and hidden where they stand in a value: settings are written beside each state, and shown.
* A field of `optimizer` or `model` that has its default is left out: versions with and without it compare alike.
* A schedule that ends with the training, because the file gives no end of its own, counts with it.

The head asks of two descriptions in the log; a worker asks of its own and of the one that stands beside a saved state.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from pathlib import PurePath

import msgspec

from unicrond.events.host.masking import PATTERN_MASK, is_secret_flag
from unicrond.events.megatron.command_line import ENTRY, BadFlags, CommandLine
from unicrond.events.vocabulary.phrases import clean
from unicrond.events.vocabulary.tasks import TaskSpec

_VALUE_CHARS = 60
_NAMED_MAX = 3
#: The built-in GPT, the one entry that reads `model` and `optimizer` of the task file.
_BUILT_IN = "gpt"
_FROM_TASK = {"--seed": "seed", "--global-batch-size": "global_batch"}
#: Beginnings of flags that change no parameter of the model that comes out, up to the order of sums.
_NEUTRAL = (
    "--log-", "--tensorboard-", "--wandb-", "--timing-", "--profile", "--save", "--exit-", "--eval-", "--num-workers",
    "--distributed-", "--local-rank", "--async-", "--ckpt-format", "--ckpt-fully-parallel", "--ckpt-assume-",
    "--dist-ckpt-", "--use-dist-ckpt", "--recompute-", "--overlap-", "--tp-comm-", "--tensor-model-parallel-",
    "--pipeline-model-parallel-", "--num-layers-per-virtual-", "--num-virtual-stages-", "--expert-model-parallel-",
    "--expert-tensor-parallel-", "--sequence-parallel", "--micro-batch-size", "--train-iters", "--train-samples",
    "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler", "--use-distributed-optimizer",
    "--data-cache-path", "--manual-gc", "--no-one-logger", "--enable-one-logger", "--one-logger-",
)  # fmt: skip
_CONSTANT = "constant"
#: What `unicronctl set` changes of a running task.
CHANGEABLE = ("optimizer.lr", "optimizer.decay_iterations", "--lr", "--lr-decay-iters")


def settings_of(spec: TaskSpec) -> dict[str, str]:
    """Return the settings of a task that decide what is trained, by name, as text."""
    settings = _of_megatron(spec) if spec.entry == ENTRY else _of_task(spec)
    return {name: PATTERN_MASK.text(value) for name, value in settings.items()}


def _of_task(spec: TaskSpec) -> dict[str, str]:
    settings = {
        "seed": str(spec.seed),
        "data": spec.data,
        "global_batch": str(spec.global_batch),
        "entry": PurePath(spec.entry).name,
    }
    if spec.entry != _BUILT_IN:
        return {**settings, **_of_words(_without_secrets(spec.args))}
    fields = {name: value for name, value in _of_parts(spec).items() if value != _DEFAULTS.get(name)}
    return {**settings, **fields, "optimizer.decay_iterations": str(spec.optimizer.decay_iterations or spec.iterations)}


def _of_parts(spec: TaskSpec) -> dict[str, str]:
    """Return the values of `optimizer` and `model`, but for the place of its state and the end of its schedule."""
    parts = {"optimizer": spec.optimizer, "model": spec.model}
    settings = {
        f"{part}.{name}": str(value)
        for part, values in parts.items()
        for name, value in msgspec.structs.asdict(values).items()
    }
    del settings["optimizer.distributed"], settings["optimizer.decay_iterations"]
    return settings


#: What is not given has these; a state of before a field was added has none of it.
_DEFAULTS = _of_parts(TaskSpec(name="any"))


def _of_megatron(spec: TaskSpec) -> dict[str, str]:
    args = _without_secrets(spec.args)
    try:
        line = CommandLine.parse(args)
    except BadFlags:  # other code says so
        return {"args": " ".join(args)}
    settings = {flag: str(getattr(spec, name)) for flag, name in _FROM_TASK.items()}
    settings["script"] = PurePath(line.script).name
    for flag, words in line.flags.items():
        if flag not in _FROM_TASK and not flag.startswith(_NEUTRAL):
            settings[flag] = " ".join(words)
    ends = {"--lr-decay-iters", "--lr-decay-samples"} & line.flags.keys()
    if not ends and line.text("--lr-decay-style") != _CONSTANT:
        settings["--lr-decay-iters"] = str(spec.iterations)
    return settings


def _of_words(args: Iterable[str]) -> dict[str, str]:
    """Return the values of a script's own arguments by flag; words before the first flag by "args". Of a flag that
    stands twice all count, with its name between them: "a --data b"."""
    words: dict[str, list[str]] = {}
    name = "args"
    for word in args:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            before = [*words[name], name] if name in words else []
            words[name] = [*before, value] if equals else before
        else:
            words.setdefault(name, []).append(word)
    return {name: " ".join(values) for name, values in words.items()}


def _without_secrets(args: Iterable[str]) -> list[str]:
    """Return the words without flags whose value is a secret, and that. One that was changed trains nothing else."""
    return [
        word
        for previous, word in pairwise(("", *args))
        if not is_secret_flag(word.partition("=")[0])
        if not is_secret_flag(previous) or word.startswith("--")
    ]


def differences(before: Mapping[str, str], now: Mapping[str, str], leave_out: Collection[str] = ()) -> list[str]:
    """Return what differs, a line for each: "seed: 1234 before, 7 now"; the most telling names first. `leave_out`:
    names that do not count."""
    before, now = ({**settings, **_DEFAULTS, **settings} for settings in (before, now))
    return [
        f"{clean(name)}: {_shown(before.get(name))} before, {_shown(now.get(name))} now"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name) and name not in leave_out
    ]


def listed(changes: list[str]) -> str:
    """Return the first changes, and how many there are beside them."""
    more = f", and {len(changes) - _NAMED_MAX} more" if len(changes) > _NAMED_MAX else ""
    return f"{'; '.join(changes[:_NAMED_MAX])}{more}"


def refusal(task: str, changes: list[str]) -> str:
    """Return the sentence by which a task is refused whose name has states of other settings."""
    return (
        f"the saved states of task {task} were made with other settings ({listed(changes)});"
        " submit it with --resume to go on from them all the same, with --restart to begin anew (they are kept), or"
        " with --fork NAME to begin another task from them"
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "not given"
    if not value.isprintable():
        value = repr(value)
    if len(value) > _VALUE_CHARS:
        return f"{value[:_VALUE_CHARS]}..."
    return value or "empty"
