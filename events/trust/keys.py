"""Keys: the nkey of one login, in a file that is its owner's alone.

The file holds the login's name and the seed, a line each; lines that begin with # are for people. After them, where
the cluster speaks TLS, stand in PEM a certificate of the login with its private key, and last the cluster's CA; before
these the word `states`, where NATS servers are not of that CA. Whoever can read it is this login, so it is refused
where others can, or where it is a link that somebody else may have set.

A credentials file of NATS (a JWT with its seed, where servers are in operator mode) is a key as well, where its user
has the name of a login.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

import nkeys

from unicrond.events.trust.logins import BadLogin, User, role_of

_MOST_BYTES = 64 * 1024
_CERTIFICATE = "-----BEGIN CERTIFICATE-----"
_STATES = "states"
_CREDENTIALS = re.compile(r"-BEGIN NATS USER JWT-+\s+(\S+)\s+-+END.*-BEGIN USER NKEY SEED-+\s+(\S+)\s+-+END", re.DOTALL)


class BadKey(ValueError):
    """The file holds no key that may be used; the text names the file and the fix."""


class Key(NamedTuple):
    """A login with its secret.

    `has_jwt`: NATS needs the whole file from which it was read. `ends_s`: when its JWT expires, in seconds since 1970;
    None: never. `pem`: certificates, as they stand in the file. `is_for_states`: these serve the exchange of states
    alone.
    """

    login: str
    seed: str
    has_jwt: bool = False
    ends_s: int | None = None
    pem: str = ""
    is_for_states: bool = False

    @property
    def nats_ca(self) -> str:
        """Return the CA of the NATS servers, in PEM; "" where the key carries none."""
        return "" if self.is_for_states else self.ca

    @property
    def ca(self) -> str:
        """Return the cluster's CA, or while it is replaced both, in PEM; "" where the key carries none."""
        _, _, rest = self.pem.rpartition("PRIVATE KEY-")  # what comes before is the login's own certificate
        _, begin, text = rest.partition(_CERTIFICATE)
        return begin + text

    @property
    def has_certificate(self) -> bool:
        """Say whether it carries a certificate of the login, with its private key."""
        return "PRIVATE KEY-" in self.pem

    @property
    def user(self) -> User:
        """Return the login with its public key, for the server's configuration."""
        return User(self.login, public_key(self.seed))


def make_key(login: str) -> Key:
    """Make a new key for `login`. Raises BadLogin."""
    role_of(login)
    return Key(login, nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER).decode())


def public_key(seed: str) -> str:
    """Return the public part of a seed. Raises ValueError."""
    try:
        pair = nkeys.from_seed(bytearray(seed.encode()))
        return bytes(pair.public_key).decode()
    except Exception as error:  # nkeys has no one base for what it raises, and so has base64
        raise ValueError(f"not the seed of an nkey ({type(error).__name__})") from None


def write_key(path: Path, key: Key) -> None:
    """Write the key into a new file that its owner alone can read. Raises FileExistsError, OSError."""
    about = f"# unicrond key of {key.login}, public {key.user.key}. Keep it secret."
    states = f"{_STATES}\n" if key.is_for_states else ""
    write_private(path, f"{about}\n{key.login}\n{key.seed}\n{states}{key.pem}")


def rewrite_key(path: Path, key: Key) -> None:
    """Replace the key in an existing file, all or nothing. Raises OSError."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    write_key(new, key)
    new.replace(path)


def write_private(path: Path, text: str) -> None:
    """Write the text into a new file that its owner alone can read. Raises FileExistsError, OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def read_key(path: Path) -> Key:
    """Read the key in a file. Raises BadKey."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        problem = {errno.ELOOP: "is a link; give the file itself", errno.ENOENT: "is not there"}.get(
            error.errno or 0, f"cannot be read ({error.strerror}); it must belong to the user who runs this"
        )
        raise BadKey(f"{path}: {problem}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadKey(f"{path}: is not a file; give the file of a key")
        if status.st_mode & 0o077:
            raise BadKey(f"{path}: others can read this key; chmod 600 {path}, and enroll the node again")
        text = file.read(_MOST_BYTES).decode("ascii", "replace")
    try:
        parts = _CREDENTIALS.search(text)
        return _parse_credentials(*parts.groups()) if parts else _parse_lines(text)
    except BadLogin as error:
        raise BadKey(f"{path}: is not a key of unicrond: {error}") from None
    except ValueError as error:
        raise BadKey(f"{path}: is not a key of unicrond; {error}") from None


def _parse_lines(text: str) -> Key:
    """Parse a key of ours: login, seed, certificates."""
    text, begin, pem = text.partition(_CERTIFICATE)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    is_for_states = lines[2:] == [_STATES]
    if len(lines) != 2 + is_for_states:
        raise ValueError("a login and its seed are expected, a line each")
    login, seed = lines[:2]
    role_of(login)
    public_key(seed)
    return Key(login, seed, pem=f"{begin}{pem}", is_for_states=is_for_states)


def _parse_credentials(jwt: str, seed: str) -> Key:
    """Parse NATS credentials. Only here the JWT is believed: the server verifies it."""
    try:
        payload = jwt.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        login, owner, ends_s = str(claims["name"]), claims["sub"], int(claims.get("exp", 0)) or None
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError("its JWT cannot be read") from None
    role_of(login)
    if public_key(seed) != owner:
        raise ValueError("its seed is not that of its JWT")
    return Key(login, seed, has_jwt=True, ends_s=ends_s)


def load_or_create_key(directory: Path, login: str) -> Key:
    """Load the key of `login` from a directory; create it where there is none. Raises BadKey, BadLogin, OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{login}.key"
    with contextlib.suppress(FileExistsError):
        write_key(path, make_key(login))
    key = read_key(path)
    if key.login != login:
        raise BadKey(f"{path}: is the key of {key.login}, not of {login}")
    return key
