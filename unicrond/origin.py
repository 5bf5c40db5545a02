"""Checks that our four packages are ours: others on PyPI use the names `events`, `agents` and `replay` too.

A stranger's package can stand before ours on the path, or in ours: pip lets openai-agents overwrite
`agents/__init__.py` without a word. So each of the four says whose it is, and nothing of them is imported
before that was read. (This module stands in `unicrond`, whose name no other project uses.)
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("events", "unicrond", "agents", "replay")
#: A line of each of their `__init__.py`.
MARK = 'PROJECT = "unicrond"'


class MixedInstallation(RuntimeError):
    """A package of another project stands where one of ours should, or in it; the message says what to do."""


def check() -> None:
    """Raise MixedInstallation unless all four packages are ours and lie side by side. Imports none of them."""
    homes: dict[str, Path] = {}
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise MixedInstallation(f"package {name} is not installed; install unicrond into an environment of its own")
        homes[name] = Path(next(iter(spec.submodule_search_locations))).resolve().parent
        if not _is_marked(spec):
            raise MixedInstallation(_explain(name, homes[name]))
    ours = homes["unicrond"]
    strange = [name for name in PACKAGES if homes[name] != ours]
    if strange:
        raise MixedInstallation(
            f"package {strange[0]} comes from {homes[strange[0]]}, unicrond from {ours}; "
            "install unicrond once, into an environment of its own"
        )


def _is_marked(spec: ModuleSpec) -> bool:
    if spec.origin is None:  # no __init__.py: the stranger was removed, and took ours along
        return False
    try:
        return MARK in Path(spec.origin).read_text(errors="replace").splitlines()
    except OSError:
        return False


def _explain(name: str, home: Path) -> str:
    """Return whose package it is now, and what to do."""
    strangers = [owner for owner in _owners(f"{name}/__init__.py", home) if owner != "unicrond"]
    problem = f"package {name} in {home} is not unicrond's"
    if not (home / "unicrond").is_dir():
        return f"{problem}: another project's has the same name; install unicrond into an environment of its own"
    by = f" ({', '.join(strangers)})" if strangers else ""
    first = f"pip uninstall {' '.join(strangers)}, then " if strangers else ""
    return (
        f"{problem}: another project{by} has overwritten {name}/__init__.py; {first}install unicrond again with "
        "--force-reinstall --no-deps, or give each an environment of its own"
    )


def _owners(path: str, home: Path) -> list[str]:
    """Return the distributions in `home` that say that they brought `path`."""
    from importlib.metadata import distributions  # takes 20 ms: only in trouble

    names = []
    for distribution in distributions(path=[str(home)]):
        try:
            if any(str(file) == path for file in distribution.files or ()):
                names.append(distribution.name)
        except (OSError, ValueError):  # a record that cannot be read says nothing
            continue
    return sorted(set(names))
