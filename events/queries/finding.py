"""Findings: likely problems and their fixes, as `unicronctl doctor` and `unicron-agent --check` report them."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """A likely problem. `about`: a node, or a part of one. `problem`: the problem. `fix`: what to do."""

    about: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.about}: {self.problem}; {self.fix}"


#: Two clocks may differ by this much.
CLOCK_MAX_S = 0.5


def clock_finding(about: str, off_s: float, round_trip_s: float, reference: str) -> list[Finding]:
    """Report a clock that differs too much from the clock of `reference`.

    `off_s`: how far it is ahead, measured by a request that took `round_trip_s`; the measurement is uncertain by that
    much.
    """
    if abs(off_s) - round_trip_s <= CLOCK_MAX_S:
        return []
    way = "ahead of" if off_s > 0 else "behind"
    return [Finding(about, f"its clock is {abs(off_s):.1f} s {way} {reference}", "run a time service there (chrony)")]
