"""Valid events that were not folded (rules/admission.py): the newest, and how many of each node's."""

from __future__ import annotations

import msgspec

#: How many refused events the state remembers, and of how many nodes it counts them.
REFUSED_MAX, REFUSED_NODES_MAX = 16, 64


class Refusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A valid event that was not folded, and why (admission.py)."""

    seq: int
    event_id: str
    reason: str


class RefusalTally(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many observations of a node were refused, when the last was (log time), and why."""

    count: int = 0
    last_us: int = 0
    reason: str = ""
