"""Writes a worker's output to its log, with the values of its task's secrets masked before they reach the disk.

The value may come in two pieces; a part that may be its beginning waits for more, or for the end of the output.

A value is read as the task's user: a privileged fork server must not look for a task into files that are closed to it
(the masked text would give them away), and one that is not root could not read the user's own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from unicrond.agents.fork_server.privileges import acting_for
from unicrond.agents.fork_server.task_secrets import NoSecret, read_secrets, regular
from unicrond.agents.host.rotated_output import RotatedLog
from unicrond.agents.protocol.messages import Identity
from unicrond.events.host.masking import PLACEHOLDER, needles, values_in
from unicrond.events.vocabulary import TaskSpec

_MASK = PLACEHOLDER.encode()


class MaskedLog:
    """A RotatedLog that masks these values."""

    def __init__(self, log: RotatedLog, values: Iterable[str]) -> None:
        self._log = log
        self._needles = sorted((needle.encode() for needle in needles(values)), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._needles)))
        self._rest = b""

    @property
    def path(self) -> Path:
        """Return the path of the RotatedLog."""
        return self._log.path

    @property
    def lost_bytes(self) -> int:
        """Return the number of bytes that the RotatedLog has lost."""
        return self._log.lost_bytes

    def write(self, data: bytes) -> None:
        """Append, except for the part that may be the beginning of a value: that waits."""
        if not self._needles:
            self._log.write(data)
            return
        data, output, begin = self._rest + data, b"", 0
        while True:
            end = min(_unfinished(needle, data, begin) for needle in self._needles)
            match = self._pattern.search(data, begin)
            if match is None or end <= match.start():  # the unfinished part may become a longer value
                break
            output += data[begin : match.start()] + _MASK
            begin = match.end()
        self._rest = data[end:]
        if output := output + data[begin:end]:
            self._log.write(output)

    def end(self) -> None:
        """Write the part that waits, at the end of the output, and close the file."""
        rest, self._rest = self._rest, b""
        if rest:
            self._log.write(self._pattern.sub(_MASK, rest))
        self._log.close()

    def close(self) -> None:
        """Close the file, as a forked child must, which shares it; more than once is fine."""
        self._log.close()


def masked_log(path: Path, spec: TaskSpec, user: Identity | None) -> MaskedLog:
    """Open the log of a worker of this task, which runs as `user`. Raise OSError where that is impossible."""
    return MaskedLog(RotatedLog(path), values_of(spec, user))


def values_of(spec: TaskSpec, user: Identity | None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the secrets of a task's workers on this node: those it names, and those in its `env` that look like some.

    A secret that cannot be read is left out: the worker reports that, and ends.
    """
    values = values_in(spec.env)
    if spec.secrets:
        with acting_for(user):
            for name, source in spec.secrets.items():
                with contextlib.suppress(NoSecret):  # a pipe would hold the fork server up, and give its value but once
                    values += read_secrets({name: source}, environ, regular).values()
    return values


def _unfinished(needle: bytes, data: bytes, begin: int) -> int:
    """Return where the end of `data`, from `begin` on, starts that begins the needle and is not all of it; else its
    length."""
    place = data.find(needle[:1], max(begin, len(data) - len(needle) + 1))
    while place >= 0:
        if needle.startswith(data[place:]):
            return place
        place = data.find(needle[:1], place + 1)
    return len(data)
