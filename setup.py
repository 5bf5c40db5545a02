"""The packages of `unicrond`: those of three folders beside it too, where links in a checkout stand for them; and the
documents, which its commands quote.

A source distribution holds each file once, without the links. The rooms of the laboratory are another
distribution's, unicrond-lab (replay/pyproject.toml).
"""

from setuptools import find_packages, setup

#: Folders beside `unicrond/` that are packages in it.
BESIDE = ("events", "agents", "replay")
LABORATORY = ("replay.simulation", "replay.evaluation")


def _with_all_below(*names: str) -> list[str]:
    """Return patterns of these packages and of all below them."""
    return [pattern for name in names for pattern in (name, f"{name}.*")]


own = find_packages(include=_with_all_below("unicrond"), exclude=[f"unicrond.{name}*" for name in BESIDE])
beside = find_packages(include=_with_all_below(*BESIDE), exclude=_with_all_below(*LABORATORY))
setup(
    packages=[*own, *(f"unicrond.{name}" for name in beside), "unicrond.docs"],
    package_dir={f"unicrond.{name}": name for name in (*BESIDE, "docs")},
)
