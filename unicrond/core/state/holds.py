"""Brakes and holds: how much unicrond may take out by itself, and what it would have done beyond that.

Made by the fold alone (folding/holds.py); the rules stand in nodes/brakes.py.
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
