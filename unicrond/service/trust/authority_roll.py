"""The CA of `unicrond tls-init` is replaced while the cluster runs, in three phases.

Rules
-----
* Nobody trusts a new CA before it has a copy of it, so the CA is spread first and signs later: `trust` (ca.pem holds
  both, the old one signs), `certificate` (the new one signs; both are trusted), `finish` (ca.pem holds the new one).
  The old CA cannot sign the new one: it may sign nothing that is a CA (certificates.py).
* The phase is what the files say; nothing else remembers it. ca-next.key holds the new CA's key and certificate in one
  file, and takes the place of ca.key last of all in `certificate`.
* The phases `trust` and `certificate` end where each node has been heard with what the next one needs: its heartbeats
  say which CAs its key carries, and which one has signed its certificate (`nodes_behind`).
* Other heads have copies of these files, and a copy deletes nothing: ca-next.key counts only while ca.pem holds its CA
  behind the one that signs. `trust` never takes one over from an earlier replacement, whose key may be in wrong hands.
* Each file is replaced whole, after what it needs: a phase that was cut off is the phase before, and can be repeated;
  to repeat one that is done changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from unicrond.events.nats.server_files import replace
from unicrond.events.trust.certificates import (
    Authority,
    BadCertificate,
    all_certificates,
    authority_name,
    first_certificate,
    is_signed_by,
    make_authority,
    read_authority,
)
from unicrond.service.trust.node_certificates import CA_DAYS


class Phase(StrEnum):
    """Say how far the replacement of the CA is; NONE: one CA signs and is trusted."""

    NONE = "none"
    TRUST = "trust"
    CERTIFICATE = "certificate"


#: What comes after a phase, as one types it.
NEXT = {Phase.NONE: "--roll trust", Phase.TRUST: "--roll certificate", Phase.CERTIFICATE: "--roll finish"}


class OutOfTurn(ValueError):
    """The phase that was asked for is not next; the text says which is."""


def nodes_behind(
    phase: Phase, incoming: str, nodes: Mapping[str, Sequence[str] | None], *, signs_for_nats: bool
) -> list[str]:
    """Return the nodes that would be cut off by the end of this phase, each with what it stands on.

    `incoming`: the new CA. `nodes`: what each node says that it has (Heartbeat.authorities). `signs_for_nats`: the CA
    has certified the NATS server too; else it matters to nodes with a certificate alone.
    """
    lines = []
    for node, authorities in nodes.items():
        if not authorities:
            reason = "not heard" if authorities is None else "its agent is of a version that does not say"
        elif not authorities[0] and not signs_for_nats:
            continue
        elif incoming not in authorities[1:]:
            reason = "without the new CA"
        elif phase is Phase.CERTIFICATE and authorities[0] not in ("", incoming):
            reason = "with a certificate of the old CA"
        else:
            continue
        lines.append(f"{node} ({reason})")
    return lines


class AuthorityRoll:
    """The files of a CA that is replaced: its certificates `ca`, its private key, and the head's certificate `cert`."""

    def __init__(self, ca: Path, key: Path, cert: Path) -> None:
        self._ca = ca
        self._key = key
        self._cert = cert
        self._next = key.with_name("ca-next.key")

    def phase(self) -> Phase:
        """Return the phase that the files are in. Raises BadCertificate, OSError."""
        pem = self._ca.read_bytes()
        authorities, signing = all_certificates(pem), read_authority(pem, self._key.read_bytes()).certificate
        later = authorities[authorities.index(signing) + 1 :]
        if later and self._next.exists() and first_certificate(self._next.read_bytes()) in later:
            return Phase.TRUST
        return Phase.CERTIFICATE if len(authorities) > 1 else Phase.NONE

    def incoming(self) -> str:
        """Return the name of the CA that replaces the other, "" where none is replaced. Raises BadCertificate,
        OSError."""
        match self.phase():
            case Phase.TRUST:
                return authority_name(self._next_authority().certificate)
            case Phase.CERTIFICATE:
                authority = read_authority(self._ca.read_bytes(), self._key.read_bytes())
                return authority_name(authority.certificate)
            case _:
                return ""

    def trust(self, now: datetime) -> bool:
        """Have ca.pem hold a new CA too; return whether anything has changed. Raises OutOfTurn, BadCertificate,
        OSError."""
        if self._is_done(Phase.TRUST, after=Phase.NONE):
            return False
        authority = read_authority(self._ca.read_bytes(), self._key.read_bytes())
        new = make_authority(now, CA_DAYS)
        replace(self._next, (new.key_pem + new.certificate_pem).decode())
        self._sync()
        replace(self._ca, (authority.certificate_pem + new.certificate_pem).decode())
        return True

    def certificate(self, issue: Callable[[Authority], bytes]) -> bool:
        """Have the new CA sign from now on, first the head's certificate, which `issue` makes; return whether anything
        has changed. Raises OutOfTurn, BadCertificate, OSError."""
        if self._is_done(Phase.CERTIFICATE, after=Phase.TRUST):
            return False
        authority = self._next_authority()
        if not is_signed_by(first_certificate(self._cert.read_bytes()), authority.certificate):
            replace(self._cert, issue(authority).decode())
            self._sync()
        self._next.replace(self._key)
        self._sync()
        return True

    def finish(self) -> bool:
        """Have ca.pem hold the CA that signs alone; return whether anything has changed. Raises OutOfTurn,
        BadCertificate, OSError."""
        if self._is_done(Phase.NONE, after=Phase.CERTIFICATE):
            return False
        authority = read_authority(self._ca.read_bytes(), self._key.read_bytes())
        replace(self._ca, authority.certificate_pem.decode())
        return True

    def _is_done(self, phase: Phase, *, after: Phase) -> bool:
        """Say whether the phase is reached; raise OutOfTurn where it is not the next one either."""
        now = self.phase()
        if now not in (phase, after):
            raise OutOfTurn(f"the CA's replacement is in phase {now}; next comes unicrond tls-init {NEXT[now]}")
        return now is phase

    def _next_authority(self) -> Authority:
        pem = self._next.read_bytes()
        try:
            return read_authority(pem, pem)
        except BadCertificate as error:
            raise BadCertificate(f"{self._next}: {error}") from None

    def _sync(self) -> None:
        """Have what was renamed on the disk before the next file changes."""
        descriptor = os.open(self._ca.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
