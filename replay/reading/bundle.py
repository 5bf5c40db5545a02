"""The file that `unicronctl debug` writes: a zip archive, of which the log is one member. `--log` opens it."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unicrond.events.log.event_log import LogDamaged

#: The member that is the log, as `unicron-replay export` writes it.
LOG = "unicrond.events.log.event_log"


@contextmanager
def unpack_log(path: Path) -> Iterator[Path]:
    """Unpack the log of a bundle into a file that exists as long as the context; yield any other path as it is.

    Raises LogDamaged where the archive holds no log."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="unicron-replay-") as place:
        try:
            with zipfile.ZipFile(path) as bundle:
                bundle.extract(LOG, place)
        except (KeyError, zipfile.BadZipFile) as error:
            raise LogDamaged(f"{path}: holds no {LOG} ({error}); name a file of `unicronctl debug`") from None
        yield Path(place) / LOG
