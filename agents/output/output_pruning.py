"""Bounds the size of workers' logs: removes those of ended workers by age, by size, and where the disk is full.

    <logs>/<task>/<worker>.log, .log.1, ...     (rotated_output.py bounds each by itself)

Rules
-----
* A living worker's logs are never touched: only whole logs of workers that have ended are removed, the one that was
  written to the longest ago first.
* They are removed when no process has written to them for `max_age_s`; then while all logs together hold more than
  `max_bytes`; then while less than `reserve_bytes` are free.
* Logs that cannot be read or removed are skipped: this is only tidying up.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unicrond.events.vocabulary import WorkerId

_LOG = re.compile(r"^(?P<worker>.+\.[0-9]+)\.log(\.[0-9]+)?$")
MAX_AGE_S = 14 * 86_400.0
_MAX_BYTES = 4 * 2**30
_RESERVE_BYTES = 64 * 2**20
#: Shares of the volume that the logs are on; the two numbers above are for large volumes.
_MAX_SHARE = 0.1
_RESERVE_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long logs of ended workers are kept (seconds), how much they and the others may hold, and how much of the
    volume is to stay free (bytes)."""

    max_age_s: float
    max_bytes: int
    reserve_bytes: int

    @classmethod
    def of(cls, directory: Path, max_age_s: float | None, max_bytes: int | None) -> Limits:
        """Build the limits from the flags; None: two weeks, and 4 GiB or a tenth of `directory`'s volume. Raise
        OSError."""
        total = shutil.disk_usage(directory).total
        return cls(
            max_age_s=MAX_AGE_S if max_age_s is None else max_age_s,
            max_bytes=min(_MAX_BYTES, int(_MAX_SHARE * total)) if max_bytes is None else max_bytes,
            reserve_bytes=min(_RESERVE_BYTES, int(_RESERVE_SHARE * total)),
        )


@dataclass(slots=True)
class _Log:
    """The log of one worker with its rotated parts."""

    worker: WorkerId
    written_s: float = 0.0
    size_bytes: int = 0
    parts: list[Path] = field(default_factory=list)


def prune(
    logs: Path,
    living: Collection[WorkerId],
    limits: Limits,
    now_s: float,
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> tuple[int, int]:
    """Remove the logs that are too old or too large; return how many workers' logs were removed, and how many bytes.

    `now_s`: by the wall clock. `free_bytes` returns the free bytes of the volume.
    """
    worker_logs = list(_scan(logs))
    total = sum(log.size_bytes for log in worker_logs)
    removed = removed_bytes = 0
    for log in sorted((log for log in worker_logs if log.worker not in living), key=lambda log: log.written_s):
        is_old = now_s - log.written_s > limits.max_age_s
        if not is_old and total <= limits.max_bytes and free_bytes(logs) >= limits.reserve_bytes:
            break
        for part in log.parts:
            with contextlib.suppress(OSError):
                part.unlink()
        with contextlib.suppress(OSError):  # another worker's log is in it
            log.parts[0].parent.rmdir()
        total -= log.size_bytes
        removed, removed_bytes = removed + 1, removed_bytes + log.size_bytes
    return removed, removed_bytes


def _scan(logs: Path) -> Iterator[_Log]:
    for task in _entries(logs):
        if not task.is_dir(follow_symlinks=False):
            continue
        workers: dict[WorkerId, _Log] = {}
        for entry in _entries(Path(task.path)):
            match = _LOG.match(entry.name)
            with contextlib.suppress(OSError):
                if match is None or not entry.is_file(follow_symlinks=False):
                    continue
                status = entry.stat(follow_symlinks=False)
                log = workers.setdefault(match["worker"], _Log(match["worker"]))
                log.written_s = max(log.written_s, status.st_mtime)
                log.size_bytes += status.st_blocks * 512
                log.parts.append(Path(entry.path))
        yield from workers.values()


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []
