"""When many nodes are lost at once: one cause, and no machine to blame. Pure.

Rules
-----
* At least OUTAGE_NODES nodes that fall silent within one heartbeat of each other, and at least one in OUTAGE_PART of
  those that are up, are one outage (a rack, a switch, power): by chance alone as many machines do not fail together.
* It is one incident (`domain_lost`), and one failure in the failure rate. Nobody is isolated for it: the return of its
  nodes is no flap, and counts for no score.
* The first node at its limit waits for the others that are late, which are at theirs a heartbeat later; for
  longer it waits for nobody. Where fewer are late nobody waits: a single death is found as fast as ever.

What does not live here: the silence of all nodes (deafness.py).
"""

from __future__ import annotations

#: The fewest nodes of an outage; and it takes one at least of so many that are up.
OUTAGE_NODES, OUTAGE_PART = 3, 3


def is_outage(silent: int, up: int) -> bool:
    """Return whether so many silent nodes, of those that are up, have one cause."""
    return silent >= OUTAGE_NODES and OUTAGE_PART * silent >= up


def waits_for(late: int, overdue: int, up: int) -> bool:
    """Return whether those that are overdue are judged later, together with the others that are late by now."""
    return late > overdue and is_outage(late, up)
