"""TLS of the head as configured: whether, and with which certificates."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from unicrond.events.nats.server import ServerTls


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates in PEM of one's own; all empty: those of `unicrond tls-init`, in <state_dir>/tls.

    `client_certificates`: NATS wants one of each client. `also_plain`: NATS lets clients in without TLS too.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    client_certificates: bool = False
    also_plain: bool = False


class Files(NamedTuple):
    """`cert`: the chain, the server's certificate first. `key`: its private key; both may be one file."""

    ca: Path
    cert: Path
    key: Path


class BadTls(ValueError):
    """The certificates cannot be used; one line with the fix."""


def files_of(tls: Tls, state_dir: Path) -> Files:
    """Return where the certificates are, or will be."""
    directory = (state_dir / "tls").absolute()
    cert = Path(tls.cert or directory / "server.pem").absolute()
    return Files(Path(tls.ca or directory / "ca.pem").absolute(), cert, Path(tls.key).absolute() if tls.key else cert)


def ca_key_of(state_dir: Path) -> Path:
    """Return the path of the private key of the CA that `unicrond tls-init` makes."""
    return (state_dir / "tls" / "ca.key").absolute()


def server_tls(tls: Tls, files: Files, host: str) -> ServerTls:
    """Return the TLS settings of a server at `host`: its clients on this machine expect that name, or the first in the
    certificate. Raise BadTls."""
    return ServerTls(
        *files,
        name=expected_name(files, host),
        wants_clients=tls.client_certificates,
        also_plain=tls.also_plain,
    )


def expected_name(files: Files, host: str) -> str:
    """Return the name in the server's certificate by which a client on this machine knows it. Raise BadTls."""
    from unicrond.events.trust.certificates import BadCertificate, first_certificate, names_of  # 60 ms

    try:
        names = names_of(first_certificate(files.cert.read_bytes()))
    except (OSError, BadCertificate) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadTls(
            f"{files.cert}: {reason}; run `unicrond tls-init`, or set tls to certificates of your own"
        ) from None
    if not names:
        raise BadTls(f"{files.cert}: names no host; its certificate needs the head's names (subjectAltName)")
    return host if host in names else names[0]
