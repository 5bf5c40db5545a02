"""What is installed only where it is needed (the extras of pyproject.toml), and what is said where it is missing."""

from __future__ import annotations

from importlib.util import find_spec

#: The modules of each extra. The base install has `unicronctl` and what reads logs.
MODULES: dict[str, tuple[str, ...]] = {
    "head": ("uvloop", "prometheus_client", "cryptography", "numpy", "numba"),
    "node": ("uvloop", "cryptography", "numpy", "torch", "megatron.core"),
    "all": ("psutil",),
    "plot": ("matplotlib",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "stacks": (),  # py-spy, a program
    "gpu": ("pynvml",),
}
#: What an extra includes.
_WITH: dict[str, tuple[str, ...]] = {"all": ("head", "node")}


class MissingExtra(Exception):
    """A part that this command needs is not installed; the message is one line that says which, and how to get it."""


def require(command: str, extra: str) -> None:
    """Raises MissingExtra unless everything of `extra` can be imported. Imports nothing."""
    wanted = [module for part in (*_WITH.get(extra, ()), extra) for module in MODULES[part]]
    missing = next((module for module in wanted if not _is_there(module)), None)
    if missing is not None:
        raise MissingExtra(_line(command, missing, extra))


def explain(command: str, error: ModuleNotFoundError) -> MissingExtra | None:
    """What to say of a failed import, None where no extra brings that module."""
    root = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if root in (module.partition(".")[0] for module in modules):
            return MissingExtra(_line(command, root, extra))
    return None


def how_to_install(extra: str) -> str:
    """The command; with the package there already, pip fetches what the extra adds."""
    return f"pip install 'unicrond[{extra}]'"


def _line(command: str, module: str, extra: str) -> str:
    return f"{command} needs the extra `{extra}` ({module} is not installed): {how_to_install(extra)}"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False
