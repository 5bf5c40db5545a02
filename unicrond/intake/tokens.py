"""Tokens of the HTTP API: their holders and scopes.

A line of the file reads `NAME SCOPE[,SCOPE...] SHA256`; lines that begin with # are for people. The hash is plain: a
token is made here, from 256 random bits, so it cannot be guessed from its hash. The file alone gives no access.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from unicrond.events.vocabulary import NAME_PATTERN

PREFIX = "unicron_"
_HASH = re.compile(r"[0-9a-f]{64}")


class Scope(StrEnum):
    """The operations that a token allows; no scope includes another."""

    READ = "read"
    SUBMIT = "submit"
    OPERATE = "operate"
    METRICS = "metrics"


class BadTokens(ValueError):
    """The list of tokens is invalid; the text names the line and the fix."""


class Grant(NamedTuple):
    """A caller and its scopes. `name`: "" where the API has no tokens."""

    name: str
    scopes: frozenset[Scope]


#: The grant of every caller where the API has no tokens.
FULL_GRANT = Grant("", frozenset(Scope))


def make_token() -> str:
    """Make a new token."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return the hash of a token, as the list holds it."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def line_of(name: str, scopes: Iterable[Scope], token: str) -> str:
    """Return the list's line for a token."""
    return f"{name} {','.join(sorted(scopes))} {hash_token(token)}"


def scopes_of(text: str) -> frozenset[Scope]:
    """Parse scopes separated by commas. Raise BadTokens."""
    names = text.split(",")
    if unknown := [name for name in names if name not in set(Scope)]:
        raise BadTokens(f"{unknown[0]!r} is not a scope; use {', '.join(Scope)}")
    return frozenset(map(Scope, names))


def read_tokens(text: str) -> dict[str, Grant]:
    """Read the list; return grants by the hash of their token. Raise BadTokens."""
    grants: dict[str, Grant] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3 or not re.fullmatch(NAME_PATTERN, words[0]) or not _HASH.fullmatch(words[2]):
            raise BadTokens(f"line {number}: expected NAME SCOPES HASH, as `unicrond token` prints it")
        try:
            scopes = scopes_of(words[1])
        except BadTokens as error:
            raise BadTokens(f"line {number}: {error}") from None
        if words[2] in grants or any(grant.name == words[0] for grant in grants.values()):
            raise BadTokens(f"line {number}: {words[0]} is there twice; give each token a name of its own")
        grants[words[2]] = Grant(words[0], scopes)
    return grants
