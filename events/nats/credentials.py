"""The credentials that a connection presents: what its login's files hold at that moment, and what worked last.

Rules
-----
* Files are read at each attempt to connect, and looked at while a session stands. A session moves to what has changed
  once the server accepts it, and stays with what it has until then.
* Where the server refuses what the files hold, or they cannot be read, what worked last is presented: so a server may
  change before its clients or after them.
* Files with the same content as before are no change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from unicrond.events.host.file_versions import FileVersion, file_version
from unicrond.events.nats.login import ConnectArguments, Login
from unicrond.events.trust.keys import BadKey


class CredentialHistory:
    """The credentials of one connection, over time."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._in_use: ConnectArguments | None = None
        self._versions: Sequence[FileVersion | None] = ()
        self._digest = self._digest_in_use = b""

    def load(self) -> list[ConnectArguments]:
        """Return what the files hold now, in the order in which it is to be tried. Raise BadKey, BadCa, OSError."""
        self._versions = self._versions_now()
        self._digest = _digest(self._login.files)
        newest = self._login.credentials()
        inbox = self._in_use and self._in_use.arguments.get("inbox_prefix")
        if inbox and newest[0].arguments.get("inbox_prefix") != inbox:
            raise BadKey(f"{self._login.key}: is the key of another login now; put the key of this one there")
        return newest

    def previous(self) -> list[ConnectArguments]:
        """Return what worked last, where the files hold something else by now."""
        return [self._in_use] if self._in_use is not None and self._digest != self._digest_in_use else []

    def accept(self, credentials: ConnectArguments) -> None:
        """Record that the server accepts these."""
        if self._in_use is not credentials:
            self._in_use, self._digest_in_use = credentials, self._digest

    def has_changed(self) -> bool:
        """Return whether the files hold something else than what is in use. Never raise."""
        versions = self._versions_now()
        if versions != self._versions:
            self._versions, self._digest = versions, _digest(self._login.files)
        return self._digest != self._digest_in_use

    def _versions_now(self) -> list[FileVersion | None]:
        return [file_version(path) for path in self._login.files]


def _digest(paths: Sequence[Path]) -> bytes:
    """Return a digest of the files' content; what cannot be read counts as empty."""
    digest = hashlib.blake2b()
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.digest()
