"""What may not be installed (extras of pyproject.toml, and unicrond-lab), and the messages where it is missing."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

#: The modules of each extra. The base install has `unicronctl` and what reads logs.
MODULES: dict[str, tuple[str, ...]] = {
    "head": ("uvloop", "prometheus_client", "cryptography", "numpy", "numba"),
    "node": ("uvloop", "cryptography", "numpy", "torch", "megatron.core", "safetensors"),
    "all": ("psutil",),
    "plot": ("matplotlib",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "stacks": (),  # py-spy, a program
    "gpu": ("pynvml",),
    "object-store": ("s3fs",),
}
#: The distribution with the rooms `simulation` and `evaluation` of replay, and the folder that it fills.
LABORATORY = "unicrond-lab"
LABORATORY_FOLDER = "unicrond_lab"
#: What an extra includes.
_WITH: dict[str, tuple[str, ...]] = {"all": ("head", "node")}


class MissingExtra(Exception):
    """A part that this command needs is not installed; the message is one line that says which, and how to get it."""


def require(command: str, extra: str) -> None:
    """Raise MissingExtra unless everything of `extra` can be imported. Imports nothing."""
    modules = [module for part in (*_WITH.get(extra, ()), extra) for module in MODULES[part]]
    missing = next((module for module in modules if not is_installed(module)), None)
    if missing is not None:
        raise MissingExtra(_line(command, missing, extra))


def require_laboratory(command: str, module: str, own_version: str) -> None:
    """Raise MissingExtra unless this module of unicrond-lab is there, and of unicrond's own version."""
    install = f"pip install {LABORATORY}=={own_version}"
    if not is_installed(module):
        raise MissingExtra(f"{command} needs the package {LABORATORY}, which is not installed: {install}")
    spec = find_spec(module)
    if spec is not None and LABORATORY_FOLDER in (spec.origin or "").split("/"):  # else a checkout's own
        version_there = version(LABORATORY)
        if version_there != own_version:
            raise MissingExtra(f"{command} needs {LABORATORY} {own_version} ({version_there} is installed): {install}")


def explain(command: str, error: ModuleNotFoundError) -> MissingExtra | None:
    """Return the error that explains a failed import; None where no extra provides that module."""
    root = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if root in (module.partition(".")[0] for module in modules):
            return MissingExtra(_line(command, root, extra))
    return None


def install_command(extra: str) -> str:
    """Return the command that installs an extra; pip fetches only what the extra adds to the package."""
    return f"pip install 'unicrond[{extra}]'"


def _line(command: str, module: str, extra: str) -> str:
    """Format the message of MissingExtra."""
    return f"{command} needs the extra `{extra}` ({module} is not installed): {install_command(extra)}"


def is_installed(module: str) -> bool:
    """Say whether the module is installed."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False
