"""Secrets of a task: the log names where a node has them; the worker's own process reads them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from typing import TypeAlias

SECRET_BYTES_MAX = 64 * 1024


class NoSecret(Exception):
    """The node does not have the secret; the text says which and why."""


Opener: TypeAlias = Callable[[str, int], int]


def regular(path: str, flags: int) -> int:
    """Open a file that can be read without waiting, and no other. Raise OSError."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def read_secrets(
    sources: Mapping[str, str], environ: Mapping[str, str] = os.environ, opener: Opener = os.open
) -> dict[str, str]:
    """Return the values, by the name of their variable. `sources`: "file:PATH" or "env:NAME". Raise NoSecret.

    A file's last line end is not part of the value.
    """
    return {name: _value(name, source, environ, opener) for name, source in sources.items()}


def _value(name: str, source: str, environ: Mapping[str, str], opener: Opener) -> str:
    kind, _, where = source.partition(":")
    if kind == "env":
        if where not in environ:
            raise NoSecret(f"secret {name}: the agent has no variable {where}; set it in the agent's environment")
        return environ[where]
    try:
        with open(where, "rb", opener=opener) as file:
            value = file.read(SECRET_BYTES_MAX + 1)
        text = value.decode().removesuffix("\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise NoSecret(f"secret {name}: {where}: {reason}; each node of the task needs it") from None
    if len(value) > SECRET_BYTES_MAX or "\0" in text:
        raise NoSecret(
            f"secret {name}: {where}: an environment variable cannot hold it; give at most 64 KiB of text without NUL"
        )
    return text
