"""Tokens of the HTTP API: their holders and scopes, whose tasks they submit, and as which users these run.

A line of the file reads `NAME SCOPE[,SCOPE...] SHA256 [owner=NAME] [users=USER[,USER...]]`; lines that begin with # are
for people. Several tokens may have one owner; without the word a token is its own. The hash is plain: a token is made
here, from 256 random bits, so it cannot be guessed from its hash. The file alone gives no access.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from unicrond.events.vocabulary import NAME_PATTERN, USER_PATTERN

PREFIX = "unicron_"
_HASH = re.compile(r"[0-9a-f]{64}")
_FORM = "NAME SCOPES HASH [owner=NAME] [users=USER,USER]"


class Scope(StrEnum):
    """The operations that a token allows; no scope includes another."""

    READ = "read"
    READ_OWN = "read-own"
    SUBMIT = "submit"
    OPERATE = "operate"
    METRICS = "metrics"


class BadTokens(ValueError):
    """The list of tokens is invalid; the text names the line and the fix."""


class Grant(NamedTuple):
    """A caller and its scopes. `name`: "" where the API has no tokens. `owner`: whose the tasks are that it submits.
    `users`: that these may run as, the first where a task names none."""

    name: str
    scopes: frozenset[Scope]
    owner: str = ""
    users: tuple[str, ...] = ()

    @property
    def reads_own_alone(self) -> bool:
        """Return whether it sees the tasks of its owner, and no others."""
        return Scope.READ_OWN in self.scopes and Scope.READ not in self.scopes


#: The grant of every caller where the API has no tokens.
FULL_GRANT = Grant("", frozenset(Scope))


def make_token() -> str:
    """Make a new token."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return the hash of a token, as the list holds it."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def line_of(name: str, scopes: Iterable[Scope], token: str, owner: str = "", users: Sequence[str] = ()) -> str:
    """Return the list's line for a token."""
    words = [name, ",".join(sorted(scopes)), hash_token(token)]
    words += [f"owner={owner}"] if owner else []
    return " ".join([*words, f"users={','.join(users)}"] if users else words)


def scopes_of(text: str) -> frozenset[Scope]:
    """Parse scopes separated by commas. Raise BadTokens."""
    names = text.split(",")
    if unknown := [name for name in names if name not in set(Scope)]:
        raise BadTokens(f"{unknown[0]!r} is not a scope; use {', '.join(Scope)}")
    return frozenset(map(Scope, names))


def users_of(text: str) -> tuple[str, ...]:
    """Parse users separated by commas. Raise BadTokens."""
    users = tuple(text.split(","))
    for user in users:
        if not user or not re.fullmatch(USER_PATTERN, user):
            raise BadTokens(f"users: {user!r} is not a user of the nodes; give names like anna,ml")
    return users


def read_tokens(text: str) -> dict[str, Grant]:
    """Read the list; return grants by the hash of their token. Raise BadTokens."""
    grants: dict[str, Grant] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 3 or not re.fullmatch(NAME_PATTERN, words[0]) or not _HASH.fullmatch(words[2]):
            raise BadTokens(f"line {number}: expected {_FORM}, as `unicrond token` prints it")
        try:
            grant = _grant_of(words[0], scopes_of(words[1]), words[3:])
        except BadTokens as error:
            raise BadTokens(f"line {number}: {error}") from None
        if words[2] in grants or any(holder.name == grant.name for holder in grants.values()):
            raise BadTokens(f"line {number}: {grant.name} is there twice; give each token a name of its own")
        grants[words[2]] = grant
    return grants


def _grant_of(name: str, scopes: frozenset[Scope], words: Sequence[str]) -> Grant:
    """Return the grant of a line; `words`: those after the hash. Raise BadTokens."""
    values: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in ("owner", "users"):
            raise BadTokens(f"{word!r} is not expected after the hash; use owner=NAME, users=USER,USER")
        if key in values:
            raise BadTokens(f"{key} is there twice; give it once")
        values[key] = value
    owner = values.get("owner", name)
    if not re.fullmatch(NAME_PATTERN, owner):
        raise BadTokens(f"owner: {owner!r} is not a name; use letters, digits, - and _")
    return Grant(name, scopes, owner, users_of(values["users"]) if "users" in values else ())
