"""Our four packages must come from one place: `events` and `agents` are names that others on PyPI use too."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("events", "unicrond", "agents", "replay")


class MixedInstallation(RuntimeError):
    """A package of another project stands where one of ours should; the message names both places."""


def check() -> None:
    """Raises MixedInstallation unless all four packages lie side by side. Imports none of them."""
    homes: dict[str, Path] = {}
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise MixedInstallation(f"package {name} is not installed; install unicrond into an environment of its own")
        homes[name] = Path(next(iter(spec.submodule_search_locations))).resolve().parent
    ours = homes["events"]
    strange = [name for name in PACKAGES if homes[name] != ours]
    if strange:
        raise MixedInstallation(
            f"package {strange[0]} comes from {homes[strange[0]]}, events from {ours}: another project's package "
            "has the same name; install unicrond into an environment of its own"
        )
