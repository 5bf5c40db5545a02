"""Which code this is: what a log's decisions and a snapshot's state came from.

A version number alone does not tell two states of a checkout apart; the sources do.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import unicrond
from unicrond import VERSION

#: Where the code lives that makes a state of entries, and decisions of a state.
FOLDER = Path(unicrond.__file__).parent
#: What does neither: other processes' code.
OTHERS = frozenset({"agents", "replay"})


@functools.cache
def fingerprint(folder: Path = FOLDER) -> str:
    """Return 32 hexadecimal digits over all of the sources, since a list of those that matter would not stay true."""
    digest = hashlib.blake2b(VERSION.encode(), digest_size=16)
    for path in _sources(folder):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    """Yield every source file in order. A checkout's `unicrond/events` is a link to the folder beside it."""
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if Path(where) != folder or name not in OTHERS)
        yield from (Path(where, name) for name in sorted(names) if name.endswith(".py"))


def code_version() -> str:
    """Return the version and the beginning of the fingerprint, like "0.1.0+1a2b3c4d"."""
    return f"{VERSION}+{fingerprint()[:8]}"
