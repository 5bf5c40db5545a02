"""Planting of bugs: mutants, and the patches that they consist of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unicrond.core import fold


class Mutant(NamedTuple):
    """A deliberate bug. `apply`: plant it in this process."""

    description: str
    apply: Callable[[], None]


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by what `make` returns for it."""
    setattr(owner, name, make(getattr(owner, name)))


def patch_fold(event: type, make: Callable[[Any], Any]) -> None:
    """Replace the fold of the event type `event` by what `make` returns for it."""
    fold.FOLDS[event] = make(fold.FOLDS[event])
