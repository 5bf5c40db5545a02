"""How the suspicions of one group add up, so that a report costs what it changes: whether there is anything to judge.

Rules
-----
* What `hangs.judge` asks of all reports together is counted here, at first by a look at all of them, then at the cost
  of changes. Only reports of one generation count, of workers that are alive.
* It follows from the rest of its task: it is in no bytes, and makes no two states differ.

What does not live here: the verdict (hangs.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, TypeAlias

from unicrond.core.state.ordered_map import changed
from unicrond.core.state.workers import Worker
from unicrond.events.vocabulary import HangSuspected

#: A limit is three usual iterations, or more: a worker without a move for a third of it does not move.
STILL = 3
#: Where no worker waits, an iteration that is merely long looks like a hang: more patience, in limits.
ALONE_LIMITS = 3
#: A section's limit is calculated: without a move for so many of them a worker hangs there.
SECTION_LIMITS = 2

#: What is counted, and at which collective; -1: wherever.
Sign: TypeAlias = tuple[
    Literal[
        "all", "stopped", "busy", "slow", "unnumbered", "waits", "patient", "long", "entered", "waits at", "hangs at"
    ],
    int,
]


def hangs_in_section(suspicion: HangSuspected) -> bool:
    """Return whether the worker has not moved in its section for long enough, by that section's own limit."""
    return bool(suspicion.slow_section) and suspicion.still_us >= SECTION_LIMITS * suspicion.slow_limit_us


class Lateness:
    """Of the suspicions of `generation`: `counts` per sign.

    `all`: every report; `stopped`, `busy`: of a process that is stopped, or overdue by its own word; `slow`: see
    `hangs_in_section`; `unnumbered`: of an agent of an older version (HangSuspected.report_number). `waits`: in a
    collective; `long`: still for ALONE_LIMITS; `patient`: both. `entered`, `waits at`, `hangs at`: have entered so many
    collectives; wait in the last of them; stand still outside. `silent`: the member without a report that was found
    last and may still be reported, "" where there was none.
    """

    __slots__ = ("counts", "generation", "silent", "suspicions", "workers")

    def __init__(
        self,
        suspicions: Mapping[str, HangSuspected],
        workers: Mapping[str, Worker],
        generation: int,
        before: Lateness | None,
    ) -> None:
        self.suspicions = suspicions
        self.workers = workers
        self.generation = generation
        self.silent = ""
        if before is None or before.generation != generation:
            self.counts: Counter[Sign] = Counter()
            for name in suspicions:
                self.counts.update(self._signs(name))
            return
        self.silent = before.silent
        self.counts = before.counts.copy()
        worker_names = [
            name for name in changed(before.workers, workers) if name in suspicions or name in before.suspicions
        ]
        for name in {*changed(before.suspicions, suspicions), *worker_names}:
            self.counts.subtract(before._signs(name))
            self.counts.update(self._signs(name))

    def _signs(self, name: str) -> list[Sign]:
        suspicion, worker = self.suspicions.get(name), self.workers.get(name)
        if suspicion is None or worker is None or not worker.alive or suspicion.generation != self.generation:
            return []
        is_long = suspicion.still_us >= ALONE_LIMITS * suspicion.limit_us
        signs: dict[Sign, bool] = {
            ("all", -1): True,
            ("stopped", -1): suspicion.is_stopped,
            ("busy", -1): bool(suspicion.section),
            ("slow", -1): hangs_in_section(suspicion),
            ("unnumbered", -1): not suspicion.report_number,
            ("waits", -1): suspicion.is_waiting,
            ("long", -1): is_long,
            ("patient", -1): suspicion.is_waiting and is_long,
            ("entered", suspicion.collectives_entered): True,
            ("waits at", suspicion.collectives_entered): suspicion.is_waiting,
            ("hangs at", suspicion.collectives_entered): not suspicion.is_waiting
            and suspicion.still_us * STILL >= suspicion.limit_us,
        }
        return [sign for sign, applies in signs.items() if applies]

    def collectives(self) -> list[int]:
        """Return how many collectives have been entered by at least one worker, ascending."""
        return sorted([entered for (sign, entered), count in self.counts.items() if sign == "entered" and count])

    def __eq__(self, _: object) -> bool:
        """Say that it equals any other: it follows from the rest of its task, which is compared anyway."""
        return True

    def __repr__(self) -> str:
        return "None"  # as where it has not been computed yet

    __hash__ = None  # type: ignore[assignment]
