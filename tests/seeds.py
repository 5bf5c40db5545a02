"""How many random histories a test plays. UNICRON_FUZZ_SEEDS bounds that for each test; `make check` sets it to 25."""

from __future__ import annotations

import os

_BOUND = os.environ.get("UNICRON_FUZZ_SEEDS")
#: Fewer in `make test` than in `make fuzz`: on a slow machine a seed takes most of a second.
SEEDS = int(_BOUND or "250")


def at_most(count: int) -> int:
    """Return how many of `count` seeds, or of hypothesis's examples, a test plays."""
    return min(count, SEEDS) if _BOUND else count
