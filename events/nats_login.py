"""How a client logs in to NATS, and what a refusal of the server means for the person who has to mend it."""

from __future__ import annotations

import re
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from events.keys import BadKey, read_key
from events.logins import Role, consumer_names, inbox_prefix, role_of

#: How a server says that it does not let a client in.
_REFUSED = re.compile(r"authorization (violation|failed)|authentication (expired|revoked|timeout)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How to log in; all empty for an open server on loopback.

    `key` is the path of a key of ours (keys.py): the login has the rights of its role, and no others (logins.py).
    `creds` and `nkey_seed`, for logins of others, are paths of files. `tls_ca` is the path of a CA certificate and
    turns TLS on.
    """

    user: str | None = None
    password: str | None = None
    key: Path | None = None
    creds: Path | None = None
    nkey_seed: Path | None = None
    tls_ca: Path | None = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments for nats.connect. Raises BadKey."""
        key = read_key(self.key) if self.key else None
        given: dict[str, Any] = {
            "nkeys_seed_str": key.seed if key and not key.has_jwt else None,
            "inbox_prefix": inbox_prefix(key.login) if key else None,
            "user": self.user,
            "password": self.password,
            "user_credentials": str(self.key if key and key.has_jwt else self.creds or "") or None,
            "nkeys_seed": str(self.nkey_seed) if self.nkey_seed else None,
            "tls": ssl.create_default_context(cafile=str(self.tls_ca)) if self.tls_ca else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def consumer_names(self) -> tuple[str, ...]:
        """The names that its consumers may have; empty: any. Raises BadKey."""
        return consumer_names(read_key(self.key).login) if self.key else ()


def refusal(said: str, login: Login) -> str:
    """What a server's word means where it does not let this login in, and the fix; "" where it says something else."""
    found = _REFUSED.search(said)
    if found is None:
        return ""
    why = {"expired": "have expired", "revoked": "are revoked"}.get((found[2] or "").lower(), "are not valid there")
    if login.key is not None:
        return _of_a_key(login.key, why)
    if login.creds is not None:
        return f"NATS refuses the credentials in {login.creds}: they {why}; get new ones from its operator"
    if login.nkey_seed is not None:
        return f"NATS refuses the nkey in {login.nkey_seed}: the server does not list it"
    if login.user:
        return f"NATS refuses user {login.user}: the name or the password is wrong"
    return "NATS wants a login and got none; give a key (docs/operate/logins.md)"


def _of_a_key(path: Path, why: str) -> str:
    try:
        key = read_key(path)
    except BadKey as error:
        return str(error)
    role, node = role_of(key.login)
    if key.has_jwt:
        why = "have expired" if key.ends_s and key.ends_s <= time.time() else why
        return f"NATS refuses the credentials of {key.login} ({path}): they {why}; get new ones from its operator"
    if role is Role.AGENT:
        return (
            f"NATS refuses the key of node {node} ({path}): it was revoked, replaced, or not used in time; "
            f"on the head: unicrond enroll {node}"
        )
    return f"NATS refuses the key of {key.login} ({path}): the server does not list it, or lists another"
