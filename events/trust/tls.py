"""Explanations of TLS failures, with the fix for each, and the TLS contexts of our clients. Standard library alone.

nats-py speaks in clear with a server that does not ask for TLS, whatever its client was given: `Client` of
connection.py refuses that.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path

#: Before a node's name in its certificate.
NODE_URI = "unicrond://node/"
#: In the head's certificate.
HEAD_URI = "unicrond://head"
#: OpenSSL's codes of verification (x509_vfy.h).
_EXPIRED, _NOT_YET = 10, 9
_UNKNOWN = (18, 19, 20, 21)
_NAMES = (62, 64)
#: Messages of a server that requires a client certificate, and of one that does not accept the client's.
_CERTIFICATE_REQUIRED = re.compile(
    r"CERTIFICATE_REQUIRED|certificate required|HANDSHAKE_FAILURE|handshake failure", re.IGNORECASE
)
_NOT_TAKEN = re.compile(
    r"ALERT_(UNKNOWN_CA|BAD_CERTIFICATE|CERTIFICATE_\w+)|alert (unknown ca|bad certificate|certificate)", re.IGNORECASE
)
_NO_TLS = re.compile(r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|HTTP_REQUEST|wrong version number", re.IGNORECASE)


class BadCa(ValueError):
    """A file of certificates that cannot be used; the text names it and the fix."""


def client_context(
    ca: Path | None = None, *, ca_pem: str = "", certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Make the context of a client that trusts this CA alone, or without one those of the machine.

    `certificate`: the client's own, with `key`, or with the key in the same file. Raises BadCa.
    """
    try:
        context = ssl.create_default_context(cafile=str(ca) if ca else None, cadata=ca_pem or None)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise BadCa(f"{ca or 'the key'}: holds no CA certificate in PEM ({_plain(error)}); copy it again") from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise BadCa(f"{certificate}: is not a certificate with its private key ({_plain(error)})") from None
    return context


def trouble(error: BaseException, server: str, *, trusts: str, remedy: str) -> str:
    """Explain a TLS error in one line, with the fix; return "" where the error is not of TLS.

    `server`: its name for people. `trusts`: the CA that was expected, in words, "" for the machine's own. `remedy`: how
    to name the right CA.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_certificate(error, server, trusts, remedy)
    if not isinstance(error, ssl.SSLError):
        return ""
    text = str(error)
    if _CERTIFICATE_REQUIRED.search(text):
        return (
            f"{server} wants a certificate of its clients; use a key of `unicrond enroll`, or --tls-cert and --tls-key"
        )
    if _NOT_TAKEN.search(text):
        return f"{server} does not accept this client's certificate: its CA is another, or it has expired; enroll again"
    if _NO_TLS.search(text):
        return f"{server} does not speak TLS there; check the address, or connect in clear (http://, no CA)"
    return f"{server}: TLS failed ({_plain(error)}); check that both ends have certificates of the same CA"


def _explain_certificate(error: ssl.SSLCertVerificationError, server: str, trusts: str, remedy: str) -> str:
    if error.verify_code == _EXPIRED:
        return f"the certificate of {server} has expired; on the head: unicrond tls-init --renew"
    if error.verify_code == _NOT_YET:
        return f"the certificate of {server} is not valid yet; compare the clocks of this machine and of the head"
    if error.verify_code in _NAMES:
        match = re.search(r"not valid for '([^']*)'", error.verify_message)
        host = match[1] if match else "HOST"
        return (
            f"the certificate of {server} does not name {host}; use a name that it has, or on the head: "
            f"unicrond tls-init --renew --host {host}"
        )
    if error.verify_code in _UNKNOWN:
        return f"the certificate of {server} is not of {trusts or 'a CA that this machine knows'}; {remedy}"
    return f"the certificate of {server} is not accepted: {error.verify_message}"


def _plain(error: BaseException) -> str:
    return " ".join((getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)).split())
