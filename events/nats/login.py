"""A client's login to NATS, and explanations of the server's refusals, with the fix for each."""

from __future__ import annotations

import contextlib
import re
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nats.aio.client import RawCredentials

from unicrond.events.trust.keys import BadKey, Key, read_key
from unicrond.events.trust.logins import Role, inbox_prefix, role_of
from unicrond.events.trust.tls import client_context, trouble

#: Messages of a server that refuses a client.
_REFUSED = re.compile(r"authorization (violation|failed)|authentication (expired|revoked|timeout)", re.IGNORECASE)


class ConnectArguments(NamedTuple):
    """What to present to a server. `arguments`: of nats.connect. `makes_consumers`: the login may make consumers."""

    arguments: dict[str, Any]
    makes_consumers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A login to a server; all empty for an open server on loopback.

    `key` is the path of a key of ours (keys.py): the login has the rights of its role, and no others (logins.py).
    `creds` and `nkey_seed`, for logins of others, are paths of files. `password_file` holds a password on each line: an
    embedded server takes the first, a client tries each in turn. `tls_ca` is the path of a CA certificate and turns TLS
    on, as a key does that carries one. `tls_cert`, `tls_key`: the client's own certificate, where servers want one; a
    key may carry that too. `tls_name`: the name that the server's certificate must have; None: its host.
    `is_for_locked_servers`: a server that lets everybody in is refused. Files are read whenever credentials are wanted.
    """

    user: str | None = None
    password: str | None = None
    password_file: Path | None = None
    key: Path | None = None
    creds: Path | None = None
    nkey_seed: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_name: str | None = None
    is_for_locked_servers: bool = False

    def options(self) -> dict[str, Any]:
        """Return keyword arguments for nats.connect. Raise BadKey, BadCa, OSError."""
        return self.credentials()[0].arguments

    def credentials(self) -> list[ConnectArguments]:
        """Read what to present, in the order in which it is to be tried. Raise BadKey, BadCa, OSError."""
        key = read_key(self.key) if self.key else None
        jwt = self.key if key and key.has_jwt else self.creds
        seed = key.seed if key and not key.has_jwt else None
        arguments: dict[str, Any] = {
            "nkeys_seed_str": self.nkey_seed.read_text().strip() if self.nkey_seed else seed,
            "inbox_prefix": inbox_prefix(key.login) if key else None,
            "user": self.user,
            "user_credentials": RawCredentials(jwt.read_text()) if jwt else None,
            "tls": self._context(key),
            "tls_hostname": self.tls_name,
        }
        arguments = {name: value for name, value in arguments.items() if value is not None}
        makes_consumers = key is None or role_of(key.login)[0] is not Role.READER
        passwords = [{"password": password} for password in self.passwords()] or [{}]
        return [ConnectArguments({**arguments, **password}, makes_consumers) for password in passwords]

    def passwords(self) -> list[str]:
        """Read the passwords, the newest first. Raise OSError."""
        if self.password_file is None:
            return [self.password] if self.password else []
        return [line.strip() for line in self.password_file.read_text().splitlines() if line.strip()]

    @property
    def files(self) -> list[Path]:
        """Return the files that hold the credentials."""
        paths = (self.password_file, self.key, self.creds, self.nkey_seed, self.tls_ca, self.tls_cert, self.tls_key)
        return [path for path in paths if path is not None]

    def _context(self, key: Key | None) -> ssl.SSLContext | None:
        ca = key.nats_ca if key and self.tls_ca is None else ""
        if not (self.tls_ca or ca or self.tls_cert):
            return None
        certificate, certificate_key = self.tls_cert, self.tls_key
        if certificate is None and key is not None and key.nats_ca and key.has_certificate:
            certificate = self.key
        return client_context(self.tls_ca, ca_pem=ca, certificate=certificate, key=certificate_key)


def refusal(text: str, login: Login) -> str:
    """Explain a server's message that refuses this login, with the fix; return "" where the message says something
    else."""
    match = _REFUSED.search(text)
    if match is None:
        return ""
    cause = {"expired": "have expired", "revoked": "are revoked"}.get((match[2] or "").lower(), "are not valid there")
    if login.key is not None:
        return _of_a_key(login.key, cause)
    if login.creds is not None:
        return f"NATS refuses the credentials in {login.creds}: they {cause}; get new ones from its operator"
    if login.nkey_seed is not None:
        return f"NATS refuses the nkey in {login.nkey_seed}: the server does not list it"
    if login.user:
        return f"NATS refuses user {login.user}: the name or the password is wrong"
    return "NATS wants a login and got none; give a key (docs/operate/logins.md)"


def tls_trouble(error: Exception, login: Login) -> str:
    """Explain a failure of TLS, with the fix; return "" where the error is not of TLS."""
    if not isinstance(error, ssl.SSLError):
        return ""
    where = login.tls_ca
    with contextlib.suppress(BadKey):
        where = where or (login.key if login.key and read_key(login.key).nats_ca else None)
    if where is None:
        return trouble(
            error, "NATS", trusts="", remedy="give --tls-ca, or a key of `unicrond enroll`, which carries it"
        )
    remedy = "copy the head's again (STATE_DIR/tls/ca.pem), or enroll the node again"
    return trouble(error, "NATS", trusts=f"the CA in {where}", remedy=remedy)


def _of_a_key(path: Path, cause: str) -> str:
    """Explain why the server refuses this key, with the fix."""
    try:
        key = read_key(path)
    except BadKey as error:
        return str(error)
    role, node = role_of(key.login)
    if key.has_jwt:
        cause = "have expired" if key.ends_s and key.ends_s <= time.time() else cause
        return f"NATS refuses the credentials of {key.login} ({path}): they {cause}; get new ones from its operator"
    if role is Role.AGENT:
        return (
            f"NATS refuses the key of node {node} ({path}): it was revoked, replaced, or not used in time; "
            f"on the head: unicrond enroll {node}"
        )
    return f"NATS refuses the key of {key.login} ({path}): the server does not list it, or lists another"
