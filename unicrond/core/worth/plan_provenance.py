"""How a plan was made, written into the decision that adopts it.

`decide` says which plan; whether it was looked up or solved, and how long that took, is the shell's own
knowledge. It is in the log for people; a repeated decision is compared the decision without it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from unicrond.core.planning.solution import Solution
from unicrond.events.vocabulary import AnyEvent, PlanAdopted, PlanMethod

E = TypeVar("E", bound=AnyEvent)


class PlanAnswer(NamedTuple):
    """A plan problem's answer. `took_us`: from the question to the answer. `rows_reused`: of the solver's rows."""

    solution: Solution
    method: PlanMethod = "fresh"
    took_us: int = 0
    rows_reused: int = 0


def with_provenance(event: E, answered: PlanAnswer) -> E:
    """Return the event; a plan with how it was made."""
    if isinstance(event, PlanAdopted):
        return replace(event, method=answered.method, duration_us=answered.took_us, rows_reused=answered.rows_reused)
    return event


def without_provenance(event: E) -> E:
    """Return the event as `decide` gives it."""
    return replace(event, method="fresh", duration_us=0, rows_reused=0) if isinstance(event, PlanAdopted) else event
