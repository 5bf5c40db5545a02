"""The identity of this code: it tells which code made a log's decisions and a snapshot's state.

A version number alone does not tell two states of a checkout apart; the sources do.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import unicrond
import unicrond.events
from unicrond import VERSION

#: Where the code lives that makes a state of entries, and decisions of a state.
PACKAGES: tuple[Path, ...] = (Path(unicrond.__file__).parent, Path(unicrond.events.__file__).parent)


@functools.cache
def fingerprint() -> str:
    """Return 32 hexadecimal digits over all of the sources: a list of those that matter would not stay true."""
    digest = hashlib.blake2b(VERSION.encode(), digest_size=16)
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def code_version() -> str:
    """Return the version and the beginning of the fingerprint, like "0.1.0+1a2b3c4d"."""
    return f"{VERSION}+{fingerprint()[:8]}"
