"""The states of a member and which follows which: the table of the package's essay, as data."""

from __future__ import annotations

from typing import Literal, TypeAlias

State: TypeAlias = Literal[
    "new", "regrouping", "transferring", "computing", "reducing", "agreeing", "stepping", "gathering", "committing",
    "ending", "parked", "stranded", "over",
]  # fmt: skip

FOLLOWS: dict[State, frozenset[State]] = {
    "new": frozenset({"regrouping"}),
    "regrouping": frozenset({"transferring", "computing", "stepping", "gathering", "ending", "parked", "stranded"}),
    "transferring": frozenset({"regrouping", "computing", "ending"}),
    "computing": frozenset({"reducing", "regrouping", "ending"}),
    "reducing": frozenset({"agreeing", "regrouping"}),
    "agreeing": frozenset({"stepping", "regrouping"}),
    "stepping": frozenset({"gathering", "committing"}),
    "gathering": frozenset({"committing", "regrouping"}),
    "committing": frozenset({"transferring", "computing", "regrouping", "ending"}),
    "ending": frozenset({"over", "regrouping"}),
    "parked": frozenset(),
    "stranded": frozenset(),
    "over": frozenset(),
}
