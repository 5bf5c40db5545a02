"""Which members of a broken group report at once that it broke. Pure.

Rules
-----
* Each member can say whose the other ends of its broken connections are (`socket_peers.py`), and in a small group does
  so at once: blame rests on all these reports (unicrond/core/faults/blame.py).
* Of a larger group a few words will do. A few members report at once, far from each other, so that they are on
  different nodes; the others only where no urgent membership comes of that.
"""

from __future__ import annotations

#: The largest group whose members all report at once.
ALL_REPORT_MAX = 64
_FIRST = 8
_AFTER_S = 1.0


def report_after_s(rank: int, size: int) -> float:
    """Return how long the member `rank` of `size` waits for the answer to others' reports before it reports itself;
    seconds, some later than others."""
    if size <= ALL_REPORT_MAX or rank % (size // _FIRST) == 0:
        return 0.0
    return _AFTER_S * (1 + rank / size)
