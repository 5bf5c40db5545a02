"""The type of a node's GPUs: the driver's name in the terms of the throughput model's presets."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Families whose names say how much memory a GPU has, or of which there is one size.
_FAMILY = re.compile(r"\b(a100|a800|h100|h200)\b")
_MEMORY = re.compile(r"\b(\d+)gb\b")
_USUAL_GB = {"a100": 40, "a800": 80, "h100": 80, "h200": 141}
_LENGTH_MAX = 63


def gpu_type(names: Sequence[str]) -> str:
    """Return the type of GPUs from the driver's names ("NVIDIA H100 80GB HBM3"); "" without any, all types joined where
    there are several."""
    return "_".join(sorted({_type(name) for name in names} - {""}))[:_LENGTH_MAX]


def _type(name: str) -> str:
    words = name.lower()
    family = _FAMILY.search(words)
    if family is None:
        return re.sub(r"[^a-z0-9]+", "-", words.removeprefix("nvidia ")).strip("-")
    size = _MEMORY.search(words)
    return f"{family[1]}-{size[1] if size else _USUAL_GB[family[1]]}g"
