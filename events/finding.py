"""What is likely to go wrong, and what to do about it: the words of `unicronctl doctor` and `unicron-agent --check`."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """`about`: a node, or a part of one."""

    about: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.about}: {self.what}; {self.fix}"


#: So far apart two clocks may be.
CLOCK_MAX_S = 0.5


def clock_finding(about: str, off_s: float, took_s: float, whose: str) -> list[Finding]:
    """`off_s`: how far its clock is ahead of that of `whose`, by a question whose answer took `took_s`: that much is
    not known."""
    if abs(off_s) - took_s <= CLOCK_MAX_S:
        return []
    way = "ahead of" if off_s > 0 else "behind"
    return [Finding(about, f"its clock is {abs(off_s):.1f} s {way} {whose}", "run a time service there (chrony)")]
