"""The token of the head on this machine: a file that only the head's user can read, found by asking the head.

Rules
-----
* A head that gets no token from its own machine answers with the file's path. The token goes to nobody but the owner of
  the file: the process that listens on the port runs as the user whose the file is, else another user of the machine
  could listen there while the head is away, and collect tokens.
* Only what begins as a token does goes out: a head that names another file gets nothing of it.
* A head on another machine gets no file that it names: the client looks at the address that answers (ctl/client.py).
* A token that a person gives (--token-file, UNICRON_TOKEN_FILE) is the only one that is tried.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from unicrond.intake.tokens import PREFIX

#: The state of a socket that listens, in /proc/net/tcp.
_LISTENS = "0A"


class NoOwnToken(Exception):
    """The file cannot be used; the text is one line that says why, with the fix."""


def file_named(answer: bytes) -> Path | None:
    """Return the file that a head names in the JSON with which it refuses; None where it names none."""
    try:
        return Path(json.loads(answer)["token_file"])
    except (ValueError, KeyError, TypeError):
        return None


def own_token(path: Path, port: int) -> str:
    """Return the token in the file that the head on this port named. Raises NoOwnToken."""
    fix = "give --token-file, or ask as the user who runs the head"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # a ValueError: no system has a file of that name
        raise NoOwnToken(f"token: cannot read {path}: {getattr(error, 'strerror', error)}; {fix}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
            raise NoOwnToken(f"token: {path} is not a file of its owner alone; chmod 600 it, or give --token-file")
        if set(_listeners(port)) != {status.st_uid}:
            raise NoOwnToken(f"token: {path} is not of the user who listens on port {port}; give --token-file")
        token = os.read(descriptor, 4096).decode("ascii", errors="replace").strip()
    finally:
        os.close(descriptor)
    if not token.startswith(PREFIX) or not token.isprintable():
        raise NoOwnToken(f"token: {path} is not one line that begins with {PREFIX}; remove it and restart the head")
    return token


def _listeners(port: int) -> Iterator[int]:
    """Yield the uids of those who listen on this port of this machine."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                    yield int(words[7])
