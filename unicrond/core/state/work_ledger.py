"""What the cluster has achieved and what failures have cost it, as it stands in the state. Kept by `costs.py`.

Work is counted exactly, in weighted FLOP/s times microseconds, and held as whole Decimals: a month of 10,000
GPUs has more digits than the 64 bits of an integer on the wire.
"""

from __future__ import annotations

from decimal import Decimal

import msgspec

from unicrond.events.vocabulary.field_defaults import always

ZERO = Decimal(0)


class Account(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One task now. Rates in weighted FLOP/s.

    `rate`: what its group achieves, since `since_us`. `workers`: how many do. `repeats`: it trains again what had been
    committed before, for this kind of incident; "": it does not.
    While a fault keeps it from training: `had` is the rate before (since `had_since_us`), `lost_from_us` from
    when on that counts as lost, `incident` the one charged, `had_repeats` what `repeats` was.
    """

    rate: int = always(0)
    since_us: int = always(0)
    workers: int = always(0)
    had: int = always(0)
    had_since_us: int = always(0)
    lost_from_us: int = always(0)
    incident: str = always("")
    repeats: str = ""
    had_repeats: str = ""

    @property
    def achieved(self) -> int:
        """Return what the group achieves, or achieved before the fault."""
        return self.rate + self.had


class Charge(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an open incident has cost so far, in weighted FLOP/s x microseconds."""

    detection: Decimal = always(ZERO)
    transition: Decimal = always(ZERO)


class Ledger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Totals up to `until_us`, in weighted FLOP/s x microseconds, and the rates that hold from there on.

    delivered + detection + transition + repeated + sub_health = failure_free, exactly, and none is negative.
    `healthy`: what the plan would give in health now. `exposed_us`: the time that all workers together have trained.
    `failures`: closed incidents in which hardware failed. `recent_exposed_us`, `recent_failures`: the same two, the
    older the lighter (costs.py); failures in millionths.
    """

    until_us: int = always(0)
    failure_free: Decimal = always(ZERO)
    delivered: Decimal = always(ZERO)
    detection: Decimal = always(ZERO)
    transition: Decimal = always(ZERO)
    sub_health: Decimal = always(ZERO)
    healthy: int = always(0)
    accounts: dict[str, Account] = always({})
    charges: dict[str, Charge] = always({})
    exposed_us: int = always(0)
    failures: int = always(0)
    repeated: Decimal = ZERO
    recent_exposed_us: int = 0
    recent_failures: int = 0

    @property
    def achieved(self) -> int:
        """Return what all groups achieve now, or achieved before the faults that keep them from it."""
        return sum(account.achieved for account in self.accounts.values())

    @property
    def failure_free_rate(self) -> int:
        """Return what the failure-free cluster achieves now: what tasks still have of what a newer plan takes from them
        is no more than it has."""
        return max(self.healthy, self.achieved)


def open_books(ledger: Ledger) -> str:
    """Describe why the ledger does not close: a part is negative, or they do not add up; "" where it closes."""
    names = ("delivered", "detection", "transition", "repeated", "sub_health")
    parts = {name: int(getattr(ledger, name)) for name in names}
    free = int(ledger.failure_free)
    negative = ", ".join(f"{name} is {part}" for name, part in parts.items() if part < 0)
    if negative or sum(parts.values()) == free:
        return negative
    return f"parts of {sum(parts.values())} in {free}: {parts}"
