"""One coordinator at a time uses a state_dir; a second one would adopt the first one's nats-server, and end it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unicrond.events.log.event_log import LogError


class InUse(LogError):
    """The directory cannot be used; the text says why and what to do."""


@contextmanager
def sole_user(state_dir: Path) -> Iterator[None]:
    """Create the directory and hold its lock as long as the context lasts. Raises InUse."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = (state_dir / "unicrond.lock").open("a")
    except OSError as error:
        raise InUse(f"state_dir: cannot use {error.filename}: {error.strerror}; set another state_dir") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InUse(
                f"state_dir: another coordinator runs in {state_dir}; stop it first, or set another state_dir"
            ) from None
        yield
