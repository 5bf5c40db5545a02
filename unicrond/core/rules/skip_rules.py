"""Checks whether the log can do without an entry: later decisions must not depend on it. Pure.

A skip cannot be undone, so it is tried before it is written: the log is folded without the entry, and what the
entries after it say is held against the state that comes out.
"""

from __future__ import annotations

from collections.abc import Mapping

from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.log.skips import can_be_skipped
from unicrond.events.vocabulary.placements import starts
from unicrond.events.wire.envelope import Entry, RecordedEvent


class SkipRefused(ValueError):
    """The entry cannot be skipped; the message says why, and what to do, in one line."""


class SkipCheck:
    """Reads the entries in order, and says afterwards what is missing without those that are skipped."""

    def __init__(self, skips: Mapping[int, str], last_seq: int) -> None:
        """Begin the check. Raise SkipRefused for a number that the log does not have."""
        self._skips = skips
        self._generations: dict[str, int] = {}
        self._workers: dict[str, int] = {}
        for seq in skips:
            if not 1 <= seq <= last_seq:
                raise SkipRefused(f"--skip: entry {seq} is not in the log, which ends at entry {last_seq}")

    def see(self, entry: Entry) -> None:
        """Take an entry as it stands in the log. Raise SkipRefused for one that cannot be skipped at all."""
        if entry.seq in self._skips:
            if not can_be_skipped(entry):
                raise SkipRefused(f"--skip: entry {entry.seq} is a claim or a skip; the log needs it")
            return
        event = entry.envelope.event if isinstance(entry, RecordedEvent) else None
        if isinstance(event, v.MembershipDecided):
            self._generations[event.task] = max(event.generation, self._generations.get(event.task, 0))
        elif isinstance(event, v.StartWorker | v.StartWorkers):
            for start in (event,) if isinstance(event, v.StartWorker) else starts(event):
                number = int(start.worker.rpartition(".")[2])
                self._workers[event.spec.name] = max(number, self._workers.get(event.spec.name, 0))

    def require(self, state: ClusterState) -> None:
        """Raise SkipRefused where `state`, which was folded without them, would give numbers out a second time."""
        numbers = " and ".join(str(seq) for seq in self._skips)
        for name, generation in self._generations.items():
            task = state.tasks.get(name)
            if task is None or task.generation < generation:
                raise SkipRefused(f"--skip: without {numbers}, generation {generation} of task {name} would be unknown")
        for name, number in self._workers.items():
            task = state.tasks.get(name)
            if task is None or task.numbers.next_worker <= number:
                raise SkipRefused(f"--skip: without {numbers}, worker {name}.{number} would be unknown")
