"""Which members of a broken group report at once that it broke. Pure.

Rules
-----
* With their positions the members of a small group exchange the ports of their connections. Each can say whose the
  other end is, and does so at once: blame rests on all these reports (unicrond/core/blame.py).
* In a larger group the members say no more than that it broke, and one word of that will do. A few report at once, far
  from each other, so that they are on different nodes; the others only where no urgent membership comes of that.
"""

from __future__ import annotations

#: The largest group whose members tell each other their ports: as many numbers from each to each as it has members.
PORTS_MAX = 64
_FIRST = 8
_AFTER_S = 1.0


def report_after_s(rank: int, size: int) -> float:
    """How long the member `rank` of `size` waits for the answer to others' reports before it reports itself; seconds,
    some later than others."""
    if size <= PORTS_MAX or rank % (size // _FIRST) == 0:
        return 0.0
    return _AFTER_S * (1 + rank / size)
