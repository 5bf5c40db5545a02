"""Imports objects that flags name."""

from __future__ import annotations

import importlib
from typing import Any


def import_object(path: str) -> Any:
    """Import and return the object at "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
