"""One process at a time builds the indices of data sets on one file system.

Every replica has a rank 0 that builds an index where the cache holds none. The first builds it under a lock beside the
cache, the others find it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def index_lock(args: Any, builds: bool) -> Iterator[None]:
    """Hold the lock. `builds`: this process is the one of its replica that builds; others wait for it in Megatron."""
    directory = _place(args)
    if not builds or directory is None:
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / ".unicron-index.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # read only: the index must be there already
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _place(args: Any) -> Path | None:
    """Return the directory of the cache: Megatron's default is beside the first data set. None: mock data has no
    index."""
    if getattr(args, "mock_data", False):
        return None
    if getattr(args, "data_cache_path", None):
        return Path(args.data_cache_path)
    for words in (getattr(args, "data_path", None), getattr(args, "train_data_path", None)):
        for word in words or ():
            if not _is_number(word):
                return Path(word).parent
    return None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
