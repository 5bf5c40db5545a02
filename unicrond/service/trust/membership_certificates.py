"""Warrants that go beside each membership (events/trust/membership_certificates.py), signed with the head's certificate
of the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from unicrond.events.host.file_versions import file_version
from unicrond.events.log.subjects import WARRANT_HEADER
from unicrond.events.trust import membership_digest as roster
from unicrond.events.trust.certificates import BadCertificate
from unicrond.events.trust.membership_certificates import make_warrant
from unicrond.events.trust.signing import Signer
from unicrond.events.vocabulary import MembershipDecided, MembershipPart
from unicrond.events.vocabulary.placements import PartialMembership, add_part, broadcast_seats
from unicrond.events.wire.envelope import Envelope


def _now() -> datetime:
    return datetime.now(UTC)


class Warrants:
    """Signs warrants. `cert`: the file of the head's certificate and its key, which may be renewed at any time. Raises
    BadCertificate, OSError."""

    def __init__(self, cert: Path, now: Callable[[], datetime] = _now) -> None:
        self._cert = cert
        self._now = now
        self._file_version = file_version(cert)
        self._signer = Signer(cert.read_bytes())
        self._tellings: dict[str, PartialMembership | None] = {}

    def beside(self, envelope: Envelope) -> dict[str, str]:
        """Return the headers for an event that is about to be appended."""
        match envelope.event:
            case MembershipPart() as part:
                self._tellings[part.task] = add_part(self._tellings.get(part.task), part, envelope.term)
            case MembershipDecided() as decided:
                seats = broadcast_seats(self._tellings.pop(decided.task, None), decided, envelope.term) or ()
                return self._header(decided.task, decided.generation, (run.node for run in seats))
            case _:
                pass
        return {}

    def _header(self, task: str, generation: int, nodes: Iterable[str]) -> dict[str, str]:
        self._look()
        return {WARRANT_HEADER: make_warrant(self._signer, task, generation, roster.root(nodes), self._now())}

    def _look(self) -> None:
        """Sign with the newest certificate; certificates.py says what is wrong with one that cannot be used."""
        version = file_version(self._cert)
        if version == self._file_version:
            return
        self._file_version = version
        try:
            self._signer = Signer(self._cert.read_bytes())
        except (BadCertificate, OSError):
            return
