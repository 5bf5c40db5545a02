"""Learns how long the sections of a program last (hook.section), and decides for how long one may stand still.

Rules
-----
* A section that most iterations have is *usual*: its time is a part of theirs. Any other is *rare* (an evaluation, a
  checkpoint): its time comes on top of the iteration's.
* The limit is known from ENOUGH entries on: HANG times the median of the last WINDOW, twice the longest ever, FLOORS
  floors, whichever is most. It is for standing still: time without a mark. The first entry does not count: caches are
  cold. Of a rare section no entry below a tenth of the floor counts: another replica did the work.
* An entry that fails, or in which an iteration begins or another group forms, does not count, and has no limit.
* A newcomer inherits what the others know: which sections are usual, and the times of rare ones. A usual one has no
  limit of its own until this process has entered it often enough; the iteration's limit holds for it always.
* To enter and leave a usual section sends no message: it costs a microsecond of CPU.

Durations in microseconds. What does not live here: what a rare or unknown section needs besides (observing.py), who
reads the mark (agents/shell/progress_watch.py), the verdict (unicrond/core/faults/hangs.py).
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from unicrond.agents.protocol.marks import SECTION_NAME, Marker, now_us
from unicrond.agents.trainer.detection.baseline import HANG

WINDOW = 32
ENOUGH = 5
#: A section's least limit, in floors of an iteration's: storage may stall for some seconds.
FLOORS = 5
#: Different names in one program.
NAMES_MAX = 32
_WORDS = 3


class ProgramSection:
    """Hold the times of one section of the program; a `with` marks the worker as in it. `limit_us`: 0 until there are
    enough of them. `ProgramSections`, of which this is a part, records each entry.
    """

    __slots__ = ("_sections", "durations", "encoded", "inherited", "is_cold", "is_usual", "iteration", "iterations",
                 "limit_us", "longest_us")  # fmt: skip

    def __init__(self, sections: ProgramSections, name: str) -> None:
        self._sections = sections
        self.encoded = name.encode()
        self.durations: deque[int] = deque(maxlen=WINDOW)
        self.longest_us = self.limit_us = 0
        self.is_cold = True
        #: In how many iterations it was entered, and the last of them.
        self.iterations = self.iteration = 0
        #: Usual and longest time, and whether it is rare, as others know it; empty: they do not.
        self.inherited: tuple[int, ...] = ()
        #: Whether its time is known to be a part of an iteration's.
        self.is_usual = False

    @property
    def is_rare(self) -> bool:
        """Return whether most iterations go without it."""
        count = self._sections.iterations
        if self.inherited and count < WINDOW:
            return bool(self.inherited[2])
        return 2 * self.iterations < count

    def __enter__(self) -> None:
        self._sections.enter(self, self.limit_us)

    def __exit__(self, kind: object, *_: object) -> None:
        self._sections.leave(has_failed=kind is not None)

    def add(self, duration_us: int, floor_us: int) -> None:
        """Add an entry that has ended."""
        if not self.is_usual and 10 * duration_us < floor_us and self.is_rare:
            return
        if self.is_cold:
            self.is_cold = False
            return
        self.durations.append(duration_us)
        if duration_us > self.longest_us:
            self.longest_us = duration_us
        if not self.limit_us and len(self.durations) == ENOUGH:
            self.learn(floor_us)

    def learn(self, floor_us: int) -> None:
        """Calculate the limit anew."""
        if len(self.durations) >= ENOUGH:
            self.limit_us = max(HANG * int(median(self.durations)), 2 * self.longest_us, FLOORS * floor_us)
        elif self.inherited and self.is_rare:
            usual_us, longest_us, _ = self.inherited
            self.limit_us = max(HANG * usual_us, 2 * longest_us, FLOORS * floor_us)
        self.is_usual = (bool(self.limit_us) or bool(self.inherited)) and not self.is_rare


class ProgramSections:
    """The sections of one worker's program. `mark`: shows the innermost one that it is in."""

    def __init__(self, mark: Marker, floor_us: int) -> None:
        self._mark = mark
        self._floor_us = floor_us
        self._by_name: dict[str, ProgramSection] = {}
        #: Those that the program is in, the innermost last: when it was entered, its limit there, and `_turns` then.
        self._stack: list[tuple[ProgramSection, int, int, int]] = []
        #: Iterations that this worker has begun, and the number of the newest; `_turns`: these, and groups.
        self.iterations = self._iteration = self._turns = 0

    def named(self, name: str) -> ProgramSection:
        """Return the section. Raises ValueError for a name that is none, or one too many."""
        section = self._by_name.get(name)
        if section is None:
            check_name(name)
            if len(self._by_name) >= NAMES_MAX:
                names = ", ".join(sorted(self._by_name))
                raise ValueError(f"hook.section({name!r}): there are {NAMES_MAX} sections already: {names}")
            section = self._by_name[name] = ProgramSection(self, name)
        return section

    def begin_turn(self, iteration: int = 0) -> None:
        """Note that an iteration begins; 0: another group."""
        self._turns += 1
        self._stack = [(section, began_us, 0, turn) for section, began_us, _, turn in self._stack]
        if iteration and iteration != self._iteration:
            self.iterations += 1
            self._iteration = iteration

    def enter(self, section: ProgramSection, limit_us: int) -> None:
        """Mark that the program enters it, and may stand still there for `limit_us` (0: as the iteration may)."""
        began_us = now_us()
        if section.iteration != self._iteration:
            section.iteration = self._iteration
            section.iterations += 1
        self._stack.append((section, began_us, limit_us, self._turns))
        self._mark.enter_section(section.encoded, began_us, limit_us, began_us)

    def leave(self, *, has_failed: bool = False) -> int:
        """Mark that the program has left the innermost one, and return after how long."""
        section, began_us, _, turns = self._stack.pop()
        ended_us = now_us()
        if self._stack:
            outer, since_us, limit_us, _ = self._stack[-1]
            self._mark.enter_section(outer.encoded, since_us, limit_us, ended_us)
        else:
            self._mark.enter_section(b"", 0, 0, ended_us)
        if not has_failed and turns == self._turns:
            section.add(ended_us - began_us, self._floor_us)
        return ended_us - began_us

    def learn(self) -> None:
        """Calculate all limits anew, after an iteration."""
        for section in self._by_name.values():
            section.learn(self._floor_us)

    def words(self) -> dict[str, list[int]]:
        """Return what a newcomer is to know: name -> usual time, longest time, 1 for a rare one."""
        sections = {name: section for name, section in self._by_name.items() if section.limit_us}
        return {
            name: [int(median(section.durations)), section.longest_us, int(section.is_rare)]
            if section.durations
            else list(section.inherited)
            for name, section in sections.items()
        }

    def inherit(self, words: object) -> None:
        """Take another's `words`, where this one knows nothing; anything else is ignored."""
        for name, times in list(words.items())[:NAMES_MAX] if isinstance(words, dict) else ():
            if not isinstance(name, str) or SECTION_NAME.fullmatch(name) is None or not _is_words(times):
                continue
            section = self._by_name.get(name) or (self.named(name) if len(self._by_name) < NAMES_MAX else None)
            if section is not None and not section.durations:
                section.inherited = tuple(times)
                section.learn(self._floor_us)


def check_name(name: str) -> None:
    """Check the name of a section. Raises ValueError."""
    if not isinstance(name, str) or SECTION_NAME.fullmatch(name) is None:
        raise ValueError(f"hook.section({name!r}): give a name of 1 to 32 letters, digits, '_', '.' or '-'")


def _is_words(words: Any) -> bool:
    return isinstance(words, list) and len(words) == _WORDS and all(type(word) is int and word >= 0 for word in words)
