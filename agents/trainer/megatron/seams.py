"""The names in Megatron-LM's training code that are replaced, and the functions that look each of them up when they
call it.

Rules
-----
* A seam is a global of one of Megatron's modules. It works only because functions of that module look it up by name
  whenever they call it, so both are checked: that the name is there, and that those functions use it.
* No file of Megatron-LM is touched. What is behind a seam is called with the arguments as they came: signatures grow
  from release to release.
* `pretrain` and `initialize_megatron` are left alone: they are taken apart every other release.

No torch here: a test reads other releases' files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from inspect import isfunction, unwrap
from typing import Any

from unicrond.events.megatron.command_line import TESTED


class NoSeam(RuntimeError):
    """This Megatron-LM lacks a name that the adapter replaces; the text says which, in one line."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A replaced name: `name` in `megatron.training.<module>`; `users`: functions there that call it. `purpose`: why it
    is replaced."""

    module: str
    name: str
    users: tuple[str, ...]
    purpose: str


SEAMS: tuple[Seam, ...] = (
    Seam("training", "get_forward_backward_func", ("train", "evaluate"), "the micro-batches dealt, and their sum"),
    Seam("training", "train", ("pretrain",), "attaching, behind all set-up"),
    Seam("training", "train_step", ("train",), "the commit behind the optimizer's step"),
    Seam("training", "training_log", ("train",), "what is logged is the task's, and by the lead"),
    Seam("training", "evaluate_and_print_results", ("train", "pretrain"), "long work that is not training"),
    Seam("training", "checkpoint_and_decide_exit", ("train",), "all replicas end together"),
    Seam("training", "save_checkpoint", ("save_checkpoint_and_time",), "the lead replica alone writes"),
    Seam("training", "maybe_finalize_async_save", ("train",), "a save that fails later ends no training"),
    Seam("training", "get_megatron_optimizer", ("setup_model_and_optimizer",), "the sharded optimizer"),
    Seam("training", "build_pretraining_data_loader", ("build_train_valid_test_data_loaders",), "the data dealt"),
    Seam("training", "build_train_valid_test_datasets", ("build_train_valid_test_data_loaders",), "one index builder"),
    Seam("training", "print_rank_last", ("training_log", "evaluate_and_print_results"), "the lead alone prints"),
    Seam("global_vars", "_set_tensorboard_writer", ("set_global_variables",), "the lead alone writes"),
    Seam("global_vars", "_set_wandb_writer", ("set_global_variables",), "the lead alone writes"),
)
#: Looked up in one of these modules, by one of these functions, depending on the release.
VALIDATE_ARGS = (
    Seam("arguments", "validate_args", ("parse_and_validate_args",), "flags switched off or refused"),
    Seam("initialize", "validate_args", ("initialize_megatron",), "flags switched off or refused"),
)

#: Of a module's name: the names that each of its functions looks up, by function; None where there is no such module.
Lookups = Callable[[str], "dict[str, Collection[str]] | None"]


def missing(lookups: Lookups) -> Iterator[str]:
    """Yield the seams that are not there, one line each."""
    for seam in SEAMS:
        reason = _missing(seam, lookups)
        if reason:
            yield reason
    if all(_missing(seam, lookups) for seam in VALIDATE_ARGS):
        yield "megatron.training.arguments.validate_args is not there or is not called"


def _missing(seam: Seam, lookups: Lookups) -> str:
    names_by_function, module_name = lookups(seam.module), f"megatron.training.{seam.module}"
    if names_by_function is None or seam.name not in names_by_function.get("", ()):
        return f"{module_name}.{seam.name} is not there ({seam.purpose})"
    silent = [user for user in seam.users if seam.name not in names_by_function.get(user, ())]
    return f"{module_name}.{silent[0]} does not call {seam.name} ({seam.purpose})" if silent else ""


def lookups_of(modules: dict[str, Any]) -> Lookups:
    """Return the lookups of imported modules. The names of a module itself stand under ""."""

    def lookups(name: str) -> dict[str, Collection[str]] | None:
        """Return the names that each function of the module looks up."""
        module = modules.get(name)
        if module is None:
            return None
        functions = {key: unwrap(value) for key, value in vars(module).items() if isfunction(value)}
        return {"": vars(module).keys(), **{key: value.__code__.co_names for key, value in functions.items()}}

    return lookups


def require(modules: dict[str, Any]) -> None:
    """Raise NoSeam where a seam is missing."""
    for reason in missing(lookups_of(modules)):
        raise NoSeam(
            f"Megatron-LM {version(modules) or 'of an unknown version'}: {reason}; tested: {', '.join(TESTED)}"
        )


def version(modules: dict[str, Any]) -> str:
    """Return the version of megatron.core, "" where it has none."""
    return str(getattr(modules.get("core"), "__version__", ""))


def warning(release: str) -> str:
    """Return what to say of a version; "" where it was tested."""
    if not release or any(release.startswith(known_release.rpartition(".")[0] + ".") for known_release in TESTED):
        return ""
    return f"Megatron-LM {release} is not among the tested versions ({', '.join(TESTED)}); its seams are there"
