"""Masking of secrets: known values, and text that looks like a secret. Pure.

Rules
-----
* A value that is known is hidden wherever it stands; of several lines each line is. Known are the values of a task's
  `secrets` (of VALUE_LEAST characters or more: else half of a log would go), and of variables in its `env` whose name
  says that they are secrets (of LINE_LEAST or more, and no number).
* What looks like a secret by its form (keys of well-known services, JWTs, private keys, passwords in addresses, what is
  assigned to a name like `api_key`) is hidden as well. That is a net, not a proof: a task that names its secrets needs
  none.
* Text that people read gets HIDDEN in its place. Bytes of a log, which are read by offsets, keep their length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

PLACEHOLDER = "(hidden)"
VALUE_LEAST = 4
#: Of a value of several lines, such a line is a secret by itself.
LINE_LEAST = 8
#: No form of a secret is longer, so that one across the border of two pieces of a log is found by so much more of it.
REACH_BYTES = 8192
#: Names of environment variables that hold secrets: HF_TOKEN, WANDB_API_KEY, DB_PASSWORD. Not TOKENIZERS_PARALLELISM.
_SECRET_NAME = re.compile(r"token(?!iz)|secret|passw|credential|apikey|(^|_)key(_|$)|(^|_)pass(_|$)", re.IGNORECASE)
#: An argument of a program after which a secret comes.
_SECRET_FLAG = re.compile(
    r"--?(?:[\w-]*[-_])?(?:token|secret|password|passwd|api[-_]?key|access[-_]?key)", re.IGNORECASE
)
_NUMBER = re.compile(r"[0-9.,:+-]*(?:e[0-9+-]+)?")
#: An address with a password in it.
_SECRET_ADDRESS = re.compile(r"://[^/\s@]*:[^/\s@]+@")

_MIXED = r"(?=[^\s\"',;]{0,200}[0-9])(?=[^\s\"',;]{0,200}[A-Za-z])[A-Za-z0-9_\-./+=~]{12,4000}"
_ASSIGNED = r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?"
#: Forms of secrets. Where only a part is secret, what is before and after it is not matched.
_FORMS = (
    r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[\s\S]{0,4000}?(?:-----END [A-Z ]{0,20}PRIVATE KEY-----|\Z)",
    r"\b(?:hf_|gh[opsur]_|npm_)[A-Za-z0-9]{20,}",
    r"\b(?:github_pat_|glpat-|xox[abeprs]-|dckr_pat_)[A-Za-z0-9_\-]{16,}",
    r"\b(?:sk-|pypi-)(?=[A-Za-z_\-]{0,60}[0-9])[A-Za-z0-9_\-]{20,}",
    r"\bunicron_[A-Za-z0-9_\-]{43}(?![A-Za-z0-9_\-])",  # a token of the HTTP API
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\beyJ[\w\-]{8,2000}\.[\w\-]{8,4000}(?:\.[\w\-]{0,2000})?",
    r"\bS[UANOC][A-Z2-7]{56}\b",  # an nkey's seed
    r"(?<=://)[^/\s:@\"']{0,200}:[^/\s@\"']{1,200}(?=@)",
    rf"(?i:\bbearer\s){_MIXED}",
    rf"(?i:(?:(?<![a-z0-9])|(?<=_))(?:token|api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key|auth){_ASSIGNED})"
    rf"{_MIXED}",
    rf"(?i:(?:(?<![a-z0-9])|(?<=_))(?:password|passwd|secret){_ASSIGNED})[^\s\"',;)\]}}]{{4,200}}",
)
_NAME_FIRST = re.compile(rf"(?i)^(?:bearer\s|[a-z_-]+{_ASSIGNED})")


class Mask:
    """Hides `values` and what looks like a secret."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        strings = sorted(needles(values), key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, strings))) if strings else None
        self._values_bytes = (
            re.compile(b"|".join(re.escape(string.encode()) for string in strings)) if strings else None
        )

    def text(self, text: str) -> str:
        """Replace secrets in the text by PLACEHOLDER."""
        if self._values is not None:
            text = self._values.sub(PLACEHOLDER, text)
        return _SECRET_FORMS.sub(_redact, text)

    def overwrite(self, data: bytes) -> bytes:
        """Replace each byte of a secret by `*`; the length and the lines stay."""
        if self._values_bytes is not None:
            data = self._values_bytes.sub(lambda match: _stars(match[0]), data)
        return _SECRET_FORMS_BYTES.sub(_overwrite, data)


def needles(values: Iterable[str]) -> set[str]:
    """Return the strings to look for, so that none of these values shows."""
    strings: set[str] = set()
    for value in values:
        bare = value.strip()
        if len(bare) >= VALUE_LEAST:
            strings.add(bare)
        lines = bare.splitlines()
        if len(lines) > 1:
            strings |= {line.strip() for line in lines if len(line.strip()) >= LINE_LEAST}
    return strings


def values_in(env: Mapping[str, Any]) -> list[str]:
    """Return the values of the variables that look like secrets; words and numbers that any log holds are left out."""
    return [value for name in secrets_in(env) if len(value := env[name]) >= LINE_LEAST and not _NUMBER.fullmatch(value)]


def is_secret_flag(word: str) -> bool:
    """Return whether this argument of a program is a flag whose value is a secret: --hf-token, --api_key."""
    return _SECRET_FLAG.fullmatch(word) is not None


def secrets_in(env: Mapping[str, Any]) -> list[str]:
    """Return the variables among these that look like secrets, by name or by value."""
    return [
        name
        for name, value in env.items()
        if isinstance(value, str) and (_SECRET_NAME.search(name) or _SECRET_ADDRESS.search(value))
    ]


def _redact(match: re.Match[str]) -> str:
    """Replace the secret part; the name before it stays."""
    name = _NAME_FIRST.match(match[0])
    return (name[0] if name else "") + PLACEHOLDER


def _overwrite(match: re.Match[bytes]) -> bytes:
    name = _NAME_FIRST_BYTES.match(match[0])
    begin = name.end() if name else 0
    return match[0][:begin] + _stars(match[0][begin:])


def _stars(data: bytes) -> bytes:
    return re.sub(rb"[^\n]", b"*", data)


_SECRET_FORMS = re.compile("|".join(f"(?:{form})" for form in _FORMS))
_SECRET_FORMS_BYTES = re.compile(_SECRET_FORMS.pattern.encode())
_NAME_FIRST_BYTES = re.compile(_NAME_FIRST.pattern.encode())
#: What looks like a secret, where no value is known.
PATTERN_MASK = Mask()
