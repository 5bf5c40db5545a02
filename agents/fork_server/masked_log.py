"""A worker's output on its way to its log: values of its task's secrets are hidden before they come to the disk.

The value may come in two pieces; what could be its beginning waits for more, or for the end of the output.

A value is read as the task's user: a privileged fork server must not look for a task into files that are closed to it
(what is hidden would give them away), and one that is not root could not read the user's own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from agents.fork_server.privileges import acting_for
from agents.fork_server.task_secrets import NoSecret, read_secrets, regular
from agents.protocol.identity import Identity
from agents.rotated_log import RotatedLog
from events.masking import HIDDEN, needles, values_in
from events.vocabulary import TaskSpec

_HIDDEN = HIDDEN.encode()


class MaskedLog:
    """A RotatedLog that these values never come into."""

    def __init__(self, log: RotatedLog, values: Iterable[str]) -> None:
        self._log = log
        self._needles = sorted((one.encode() for one in needles(values)), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._needles)))
        self._held = b""

    @property
    def path(self) -> Path:
        """See RotatedLog."""
        return self._log.path

    @property
    def lost_bytes(self) -> int:
        """See RotatedLog."""
        return self._log.lost_bytes

    def write(self, data: bytes) -> None:
        """Append, or keep back the part that may be the beginning of a value."""
        if not self._needles:
            self._log.write(data)
            return
        data, shown, begin = self._held + data, b"", 0
        while True:
            end = min(_unfinished(needle, data, begin) for needle in self._needles)
            found = self._pattern.search(data, begin)
            if found is None or end <= found.start():  # what is unfinished may become a longer value
                break
            shown += data[begin : found.start()] + _HIDDEN
            begin = found.end()
        self._held = data[end:]
        if shown := shown + data[begin:end]:
            self._log.write(shown)

    def end(self) -> None:
        """The output has ended: write what was kept back, and close the file."""
        held, self._held = self._held, b""
        if held:
            self._log.write(self._pattern.sub(_HIDDEN, held))
        self._log.close()

    def close(self) -> None:
        """Close the file, as a forked child must, which shares it; more than once is fine."""
        self._log.close()


def masked_log(path: Path, spec: TaskSpec, user: Identity | None) -> MaskedLog:
    """The log of a worker of this task, which runs as `user`. Raises OSError where it cannot be opened."""
    return MaskedLog(RotatedLog(path), values_of(spec, user))


def values_of(spec: TaskSpec, user: Identity | None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The secrets of a task's workers on this node: those it names, and those in its `env` that look like some.

    One that cannot be read is left out: the worker says so, and ends.
    """
    found = values_in(spec.env)
    if spec.secrets:
        with acting_for(user):
            for name, source in spec.secrets.items():
                with contextlib.suppress(NoSecret):  # a pipe would hold the fork server up, and give its value but once
                    found += read_secrets({name: source}, environ, regular).values()
    return found


def _unfinished(needle: bytes, data: bytes, begin: int) -> int:
    """Where the end of `data`, from `begin` on, starts that begins the needle and is not all of it; else its length."""
    place = data.find(needle[:1], max(begin, len(data) - len(needle) + 1))
    while place >= 0:
        if needle.startswith(data[place:]):
            return place
        place = data.find(needle[:1], place + 1)
    return len(data)
