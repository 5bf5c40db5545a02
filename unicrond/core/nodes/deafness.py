"""When nobody is heard any more: the head's own trouble first. Pure; time is the shell's monotonic clock, handed in.

Rules
-----
* Of two or more nodes that are up one is silent for as long as a node may be, and all others have missed a beat by
  then: that is more likely one fault between them and the head (DNS, a password, a firewall, a switch) than as many
  faults of nodes. No node is judged. If one is heard before all are silent for so long, its beat was only late.
* To wait costs next to nothing: there is no node that could go on for those that are silent. To judge them costs their
  workers, which train on unheard.
* So it says once that it hears nobody (`SilenceHeld`), as late as it would have said that most nodes are lost. While
  that stands in the log, nothing is decided about nodes and workers (decide.py), and no time limit of theirs runs.
* It stands until all are heard again, or until the first to be heard has been there for as long as nodes are given when
  most are silent: those that are not back by then are judged as ever.
* If nobody comes for `hold_us`, the nodes are lost after all, in the incident of the silence; it stands all the same,
  and the workers of those that are heard again later train on (folding/silence.py).
* A cluster of one node, or whose other nodes are lost, is judged as ever: the silence of one node is most likely its
  own, and to name the node is what helps most.
* A coordinator that takes over while a silence stands goes on with it: it has heard nobody yet.
* While this process is stopped it hears nobody either: its pauses are no silence of theirs (`Pauses`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

#: `judges`: nodes are judged one by one. `waits`: nobody is judged. `holds`: it is time to say that nobody is heard.
#: `loses`: they are lost after all. `ends`: the silence is over, or those that are still away are judged again.
Phase: TypeAlias = Literal["judges", "waits", "holds", "loses", "ends"]


#: At so many pauses the older half is forgotten.
PAUSES_MAX = 4096


class Hearing(NamedTuple):
    """Counts what is heard at one moment. `up`: the number of nodes that are up; `silent`: of these, those that are
    silent for longer than a node may be; `late`: those that have missed a beat; `overdue`: those that are silent for
    longer than nodes may be when most are. `absent`: those that were lost in the silence. `back`: counts those that are
    heard, and were not before a time."""

    up: int
    late: int
    silent: int
    overdue: int
    absent: int
    back: Callable[[int], int]


class Pauses:
    """When this process did not listen: stretches of time, one after another. Private mutable state of a Liveness."""

    def __init__(self) -> None:
        self._ended_us: list[int] = []
        #: Of each, its length, and that of all before it.
        self._length_us: list[int] = []
        self._before_us: list[int] = []
        self._all_us = 0

    def add(self, ended_us: int, length_us: int) -> None:
        """Add a pause that has just ended; it began after the end of the one before."""
        if len(self._ended_us) == PAUSES_MAX:
            for column in (self._ended_us, self._length_us, self._before_us):
                del column[: PAUSES_MAX // 2]
        self._ended_us.append(ended_us)
        self._length_us.append(length_us)
        self._before_us.append(self._all_us)
        self._all_us += length_us

    def since(self, since_us: int) -> int:
        """Return how much of the time since then the pauses take, microseconds."""
        first = bisect_right(self._ended_us, since_us)
        if first == len(self._ended_us):
            return 0
        before_it_us = max(0, self._length_us[first] - (self._ended_us[first] - since_us))
        return self._all_us - self._before_us[first] - before_it_us


class Deafness:
    """Tells whether the head is deaf: private mutable state of a Liveness."""

    def __init__(self, return_us: int, hold_us: int) -> None:
        """Take the time that others have to come back after the first, and how long a silence of all is held."""
        self._return_us = return_us
        self._hold_us = hold_us
        self._since_us: int | None = None
        self._first_us: int | None = None
        self._is_sure = False
        self._has_ended = False

    def look(
        self,
        hearing: Hearing,
        now_us: int,
        *,
        from_us: int,
        attended_us: Callable[[int], int],
        is_held: bool,
        is_lost: bool,
    ) -> Phase:
        """Return what the moment calls for. `from_us`: since when this coordinator listens; `attended_us`: the time
        that it has listened since a given one. `is_held`: a silence stands in the log; `is_lost`: its nodes were lost
        since."""
        self._has_ended &= is_held
        if self._has_ended or not hearing.up + hearing.absent:
            return self._end(is_held=is_held)
        if self._since_us is None:
            if is_held:
                self._since_us = from_us
            elif hearing.silent and 2 <= hearing.up == hearing.late:
                self._since_us = now_us
            else:
                return "judges"
        back = hearing.back(self._since_us)
        self._is_sure |= is_held or hearing.silent == hearing.up
        if back and not self._is_sure:
            return self._end(is_held=is_held)
        if not back:
            self._first_us = None
            if not is_held:
                return "holds" if hearing.overdue == hearing.up else "waits"
            return "loses" if not is_lost and attended_us(self._since_us) > self._hold_us else "waits"
        if self._first_us is None:
            self._first_us = now_us
        if back < hearing.up + hearing.absent and attended_us(self._first_us) <= self._return_us:
            return "waits"
        return self._end(is_held=is_held)

    def _end(self, *, is_held: bool) -> Phase:
        self._since_us = self._first_us = None
        self._is_sure, self._has_ended = False, is_held
        return "ends" if is_held else "judges"
