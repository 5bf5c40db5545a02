"""Many seeds on all cores: outcomes as they come, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from unicrond.replay.simulation.run import RunOutcome, simulate

_CHUNK = 8


def outcomes(
    seeds: Sequence[int], processes: int, apply_mutant: Callable[[], object] | None = None
) -> Iterator[RunOutcome]:
    """Yield the outcomes in no certain order. `apply_mutant`: puts a deliberate bug (table.py) into every process."""
    # Spawned, not forked: the caller may have threads, and nothing of it shall be in the simulation.
    context = multiprocessing.get_context("spawn")
    at_once = 1 if apply_mutant else _CHUNK  # a search for a bug stops at the first seed that shows it
    with context.Pool(processes, _prepare, (apply_mutant,)) as pool:
        yield from pool.imap_unordered(simulate, seeds, chunksize=at_once)


def cores() -> int:
    """Count the cores that this process may use."""
    with suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _prepare(apply_mutant: Callable[[], object] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends us
    if apply_mutant:
        apply_mutant()
