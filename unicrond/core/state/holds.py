"""Brakes and holds: how much unicrond may take out by itself, what it would have done beyond that, and whom it waits
for.

Made by the fold alone (folding/holds.py, outages.py, silence.py); the rules stand in nodes/: brakes.py, outages.py and
deafness.py.
"""

from __future__ import annotations

import msgspec

from unicrond.events.vocabulary.holds import HeldAction, HoldLimit


class Brakes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of the present coordinator, by the names of its policy (policy.py)."""

    isolations_per_hour: int = 10
    isolated_share: float = 0.25
    evictions_per_hour: int = 20


class StandingHold(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision that is not carried out. `action`, `node`, `task`, `worker`, `reason`: see DecisionHeld; `limit`: what
    holds it; `since_us`: since when (log time).

    `cause`: "hardware" where the machine itself is blamed, as in Probation; not for a forecast alone, after which the
    node goes only while it can be spared. `blows_over`: the blows there whose
    back-off is over.
    """

    action: HeldAction
    limit: HoldLimit
    reason: str
    since_us: int
    node: str = ""
    task: str = ""
    worker: str = ""
    cause: str = ""
    blows_over: int = 0


class Outage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Nodes that were lost together, as long as one of them is away. `domain`: the label that they share.

    `away`: those that have not come back; `back`: those that have, and wait for more of them since `first_back_us`, the
    last of which came at `last_back_us` (log time). `is_over`: the time of the hold is.
    """

    since_us: int
    domain: str
    away: tuple[str, ...]
    back: tuple[str, ...] = ()
    first_back_us: int = 0
    last_back_us: int = 0
    is_over: bool = False


class Silence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head hears none of its nodes (nodes/deafness.py). `incident`: that of the silence. `are_lost`: they were lost
    after all, and none has come back yet."""

    since_us: int
    nodes: int
    incident: str
    are_lost: bool = False
