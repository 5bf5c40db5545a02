"""Many seeds on all cores: outcomes as they come, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress

from replay.simulation.run import Outcome, simulate

_CHUNK = 8


def outcomes(seeds: Sequence[int], processes: int, mutant: str = "") -> Iterator[Outcome]:
    """In no certain order. `mutant`: a deliberate bug (mutants.py) that every process carries."""
    # Spawned, not forked: the caller may have threads, and nothing of it shall be in the simulation.
    context = multiprocessing.get_context("spawn")
    at_once = 1 if mutant else _CHUNK  # a search for a bug stops at the first seed that shows it
    with context.Pool(processes, _prepare, (mutant,)) as pool:
        yield from pool.imap_unordered(simulate, seeds, chunksize=at_once)


def cores() -> int:
    """Cores that this process may use."""
    with suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _prepare(mutant: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends us
    if mutant:
        from replay.simulation.mutants import MUTANTS

        MUTANTS[mutant].apply()
