"""Where a worker's output lies. Names obey their patterns (no slash, no dot-dot), so no path escapes `logs`."""

from __future__ import annotations

from pathlib import Path

from unicrond.events.vocabulary import Name, WorkerId


def worker_log(logs: Path, task: Name, worker: WorkerId) -> Path:
    """Return `<logs>/<task>/<worker>.log`; rotated parts stand beside it as `.log.1` (newest), `.log.2`, ..."""
    return logs / task / f"{worker}.log"
