"""What a flag names."""

from __future__ import annotations

import importlib
from typing import Any


def imported(path: str) -> Any:
    """The object at "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
