"""Planted bugs of the books: of what was delivered and lost. See `table.py`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from unicrond.core.state.work_ledger import Ledger
from unicrond.core.worth import costs
from unicrond.replay.simulation.mutants.mutation import Mutant, patch
from unicrond.views import goodput


def _count_losses_twice() -> None:
    def make(date_back: Any) -> Any:
        """Wrap `_date_back`."""

        def generous(ledger: Any, state: Any) -> Any:
            """Charge the detection, and leave the same work delivered."""
            after = date_back(ledger, state)
            return replace(after, delivered=ledger.delivered, repeated=ledger.repeated)

        return generous

    patch(costs, "_date_back", make)


def _take_from_whom_has_nothing() -> None:
    patch(Ledger, "failure_free_rate", lambda _: property(lambda ledger: ledger.healthy))


def _date_nothing_back_in_goodput() -> None:
    patch(goodput, "_interrupt", lambda _: lambda totals, *_: totals)


def _charge_nobody_in_goodput() -> None:
    patch(goodput, "_charged", lambda _: lambda opened, *_: opened)


LEDGER_MUTANTS: dict[str, Mutant] = {
    "count_losses_twice": Mutant("what was lost to a detection counts as delivered, too", _count_losses_twice),
    "take_from_whom_has_nothing": Mutant(
        "tasks that still have what a newer plan gives to others make sub-health negative", _take_from_whom_has_nothing
    ),
    "date_nothing_back_in_goodput": Mutant(
        "goodput counts what was lost before an incident opened as delivered", _date_nothing_back_in_goodput
    ),
    "charge_nobody_in_goodput": Mutant("goodput charges transitions to no incident", _charge_nobody_in_goodput),
}
