"""Keys: the nkey of one login, in a file that is its owner's alone.

The file holds the login's name and the seed, a line each; lines that begin with # are for people. Whoever can read it
is this login, so it is refused where others can, or where it is a link that somebody else may have set.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

import nkeys

from events.logins import BadLogin, User, role_of

_MOST_BYTES = 4096


class BadKey(ValueError):
    """The file holds no key that may be used; the text names the file and the fix."""


class Key(NamedTuple):
    """A login with its secret."""

    login: str
    seed: str

    @property
    def user(self) -> User:
        """What the server is told of it."""
        return User(self.login, public_key(self.seed))


def make_key(login: str) -> Key:
    """A new one. Raises BadLogin."""
    role_of(login)
    return Key(login, nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER).decode())


def public_key(seed: str) -> str:
    """The public part of a seed. Raises ValueError."""
    try:
        pair = nkeys.from_seed(bytearray(seed.encode()))
        return bytes(pair.public_key).decode()
    except Exception as error:  # nkeys has no one base for what it raises, and so has base64
        raise ValueError(f"not the seed of an nkey ({type(error).__name__})") from None


def write_key(path: Path, key: Key) -> None:
    """Into a new file that its owner alone can read. Raises FileExistsError, OSError."""
    text = f"# unicrond key of {key.login}, public {key.user.key}. Keep it secret.\n{key.login}\n{key.seed}\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def read_key(path: Path) -> Key:
    """The key in a file. Raises BadKey."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BadKey(f"{path}: cannot be read ({error.strerror}); give the file of a key itself, not a link") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise BadKey(f"{path}: is not a file; give the file of a key")
        if found.st_mode & 0o077:
            raise BadKey(f"{path}: others can read this key; chmod 600 {path}, and enroll the node again")
        text = file.read(_MOST_BYTES).decode("ascii", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    try:
        login, seed = lines
        role_of(login)
        public_key(seed)
    except (BadLogin, ValueError) as error:
        why = error if isinstance(error, BadLogin) else "a login and its seed are expected, a line each"
        raise BadKey(f"{path}: is not a key of unicrond: {why}") from None
    return Key(login, seed)


def kept_key(directory: Path, login: str) -> Key:
    """The key of `login` in a directory, made there where there is none. Raises BadKey, BadLogin, OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{login}.key"
    with contextlib.suppress(FileExistsError):
        write_key(path, make_key(login))
    key = read_key(path)
    if key.login != login:
        raise BadKey(f"{path}: is the key of {key.login}, not of {login}")
    return key
