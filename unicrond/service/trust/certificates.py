"""The head's certificates while it runs: they are renewed without a restart, and an alarm precedes their end.

Rules
-----
* The files are looked at now and then. New ones are tried first; then the API shows them to new connections, and
  nats-server reads them at a signal. Connections that are open stay.
* If new certificates cannot be used, the last ones stay in force, and an alarm is raised.
* An alarm stands from WARN_DAYS before the server's certificate ends (a third of its time, if that is shorter).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

from unicrond.core.state.alarms import Alarm
from unicrond.events.host.file_versions import FileVersion, file_version
from unicrond.events.nats.server import ServerError
from unicrond.events.trust.certificates import BadCertificate, first_certificate
from unicrond.intake.tls import BadTls, Files

log = logging.getLogger("unicrond")

LOOK_EVERY_S = 1.0
WARN_DAYS = 30


class RenewableServer(Protocol):
    """An embedded server that can read new certificates."""

    async def renew(self) -> None:
        """Have the server read its certificates again (see EmbeddedServer)."""
        ...


def _now() -> datetime:
    return datetime.now(UTC)


class Certificates:
    """The certificates of a running head. `files`: where they are. `server`: None where it does not speak TLS, or is
    not ours. `is_for_api`: the API speaks TLS. Raises BadTls."""

    def __init__(
        self, files: Files, server: RenewableServer | None, *, is_for_api: bool, now: Callable[[], datetime] = _now
    ) -> None:
        self._files = files
        self._server = server
        self._now = now
        self._previous_alarms: list[Alarm] = []
        self._warn: datetime | None = None
        self._ends = datetime.max.replace(tzinfo=UTC)
        #: The API's TLS context; None: the API speaks in clear.
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if is_for_api else None
        #: Why the newest certificates are not in use; "" where they are.
        self.trouble = ""
        self._file_versions = _versions_of(files)
        if server is not None or is_for_api:
            self._load()

    async def run(self) -> None:
        """Look at the files now and then, until cancelled."""
        while True:
            self._say()
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Use the certificates in the files if these have changed."""
        versions = _versions_of(self._files)
        if versions == self._file_versions:
            return
        self._file_versions = versions
        try:
            self._load()
            if self._server is not None:
                await self._server.renew()
        except (BadTls, ServerError) as error:
            self.trouble = str(error)
            return
        self.trouble = ""
        log.info("new certificates are in use until %s", self._ends.date())

    def alarms(self) -> list[Alarm]:
        """Return what a person has to do about certificates."""
        text = f"the new certificates are not in use: {self.trouble}"
        lines = [Alarm("certificate-unused", text)] if self.trouble else []
        now = self._now()
        if self._warn is not None and now >= self._warn:
            days = max(0, (self._ends - now).days)
            when = f"ends in {days} days" if now < self._ends else "has expired"
            text = f"the certificate {self._files.cert} {when}: unicrond tls-init --renew"
            lines.append(Alarm("certificate-ends", text))
        return lines

    def _load(self) -> None:
        """Load the certificates. Raises BadTls, and then nothing has changed."""
        try:
            certificate = first_certificate(self._files.cert.read_bytes())
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self._files.cert, self._files.key)
            if self.context is not None:
                self.context.load_cert_chain(self._files.cert, self._files.key)
        except BadCertificate as error:
            raise BadTls(f"{self._files.cert}: {error}") from None
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error.strerror
            raise BadTls(
                f"{self._files.cert}: is not a certificate with its key {self._files.key} ({reason})"
            ) from None
        self._ends = certificate.not_valid_after_utc
        whole = self._ends - certificate.not_valid_before_utc
        self._warn = self._ends - min(timedelta(days=WARN_DAYS), whole / 3)

    def _say(self) -> None:
        alarms = self.alarms()
        for line in alarms:
            if line not in self._previous_alarms:
                log.error("ALARM: %s", line)
        self._previous_alarms = alarms


def _versions_of(files: Files) -> list[FileVersion | None]:
    return [file_version(path) for path in files]
