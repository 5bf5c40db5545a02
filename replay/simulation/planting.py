"""How a bug is planted: what a mutant is, and the patches that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unicrond.core import fold


class Mutant(NamedTuple):
    """`what`: the bug in words. `apply`: plant it in this process."""

    what: str
    apply: Callable[[], None]


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def patch_fold(event: type, make: Callable[[Any], Any]) -> None:
    """Replace the fold of the event type `event` by what `make` makes of it."""
    fold.FOLDS[event] = make(fold.FOLDS[event])
