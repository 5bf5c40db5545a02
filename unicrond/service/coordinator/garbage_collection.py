"""Short pauses of Python's garbage collector in a process that holds a large state for months.

Rules
-----
* A full collection walks all objects that can hold others, and the loop stands still meanwhile: up to 0.2 s at 2,000
  nodes, every few seconds. So what has survived one is frozen, and the next looks only at what came since. Reference
  counts free frozen objects as any others.
* A cycle that was alive then and becomes garbage later is not collected. Those are few (tasks and exceptions of asyncio
  that were under way); after THAW_AFTER collections all objects are examined once more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: A full collection comes each few seconds to minutes, as the cluster is busy.
THAW_AFTER = 2_000


@contextmanager
def short_pauses(thaw_after: int = THAW_AFTER) -> Iterator[None]:
    """Keep the garbage collector's pauses short in the whole process while the context lasts."""
    collections_left = thaw_after

    def happened(phase: str, info: dict[str, Any]) -> None:
        """Freeze what has survived a full collection; unfreeze it all after `thaw_after` of them."""
        nonlocal collections_left
        if info["generation"] != 2:
            return
        if phase == "stop":
            gc.freeze()
            return
        collections_left -= 1
        if not collections_left:
            collections_left = thaw_after
            gc.unfreeze()

    gc.callbacks.append(happened)
    try:
        yield
    finally:
        gc.callbacks.remove(happened)
        gc.unfreeze()
