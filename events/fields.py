"""How a field's default stands in the bytes.

Rule: `events/vocabulary.py` and the state's structs leave a field that has its default out of their bytes. So a
field that is added later changes neither the bytes nor the digest of what was written before it, and a reader that
does not know it reads on. The fields of schema 1 were written whatever they held; `always` keeps them so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")


def always(default: T, name: str | None = None) -> T:
    """A struct's field with this default that is written even where it has it. For fields of schema 1 alone."""
    # msgspec's omit_defaults compares with plain defaults only, never with what a factory makes.
    factory: Callable[[], Any] = (lambda: {}) if default == {} else (lambda: default)
    return cast(T, msgspec.field(default_factory=factory, name=name))
