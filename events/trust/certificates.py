"""Certificates: a small CA of a cluster's own, and what it signs. Needs `cryptography` (the extra `head`).

Rules
-----
* A certificate and its private key stand in one file, the chain first: whoever renews it replaces both at once, and
  whoever reads it finds a pair. nats-server and Python's ssl take such a file for both.
* ECDSA on P-256: every TLS library has it.
* The CA signs the head's certificate, and one for each node; a URI in it says whose it is. It may sign nothing that is
  a CA itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from unicrond.events.trust.tls import HEAD_URI, NODE_URI
from unicrond.events.vocabulary.field_types import AUTHORITIES_MAX

#: Clocks of a cluster differ.
CLOCKS = timedelta(hours=1)
_COMMON_NAME_MAX = 64
_ORGANISATION = "unicrond"


class BadCertificate(ValueError):
    """The bytes are no certificate, or not one of this key; the text says which."""


class Authority(NamedTuple):
    """A CA: its certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """Return the certificate in PEM, which everybody may read."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """Return the private key in PEM, which only the CA's owner may read."""
        return _private_pem(self.key)


def make_authority(now: datetime, days: float) -> Authority:
    """Make a CA with a new key, valid for `days`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _distinguished_name(f"unicrond CA {x509.random_serial_number():x}"[:28])
    builder = (
        _start_builder(name, name, key, now, now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def read_authority(certificate_pem: bytes, key_pem: bytes) -> Authority:
    """Read a CA from PEM; of several certificates, as while it is replaced, the one that the key belongs to. Raises
    BadCertificate."""
    certificates = all_certificates(certificate_pem)
    try:
        key = serialization.load_pem_private_key(key_pem, None)
    except (ValueError, TypeError):
        raise BadCertificate("its key is not a private key in PEM without a password") from None
    matches = [certificate for certificate in certificates if certificate.public_key() == key.public_key()]
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not matches:
        raise BadCertificate("its key is not that of the certificate")
    return Authority(matches[0], key)


def server_certificate(authority: Authority, names: Iterable[str], now: datetime, days: float) -> bytes:
    """Make the head's certificate for these names and addresses; return chain and private key in PEM. It expires no
    later than the CA."""
    names = tuple(names)
    identities = [*map(_host, names), x509.UniformResourceIdentifier(HEAD_URI)]
    return _issue(authority, names[0], x509.SubjectAlternativeName(identities), now, days)


def node_certificate(authority: Authority, node: str, now: datetime, days: float) -> bytes:
    """Make a node's certificate; return chain and private key in PEM."""
    identity = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{NODE_URI}{node}")])
    return _issue(authority, node, identity, now, days)


def all_certificates(pem: bytes) -> list[x509.Certificate]:
    """Return the certificates in PEM, one at least; other text around them is skipped. Raises BadCertificate."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise BadCertificate("holds no certificate in PEM") from None


def first_certificate(pem: bytes) -> x509.Certificate:
    """Return the first certificate in PEM; other text around it is skipped. Raises BadCertificate."""
    return all_certificates(pem)[0]


def authority_name(authority: x509.Certificate) -> str:
    """Return a short name of the CA: the first 8 bytes of its fingerprint, in hexadecimal."""
    return authority.fingerprint(hashes.SHA256()).hex()[:16]


def authorities_of(pem: str, ca: str) -> tuple[str, ...]:
    """Return the name of the CA that has signed the certificate in `pem`, "" where it holds none or another's, then of
    each CA in `ca`. Raises BadCertificate."""
    trusted = all_certificates(ca.encode()) if ca else []
    certificate = first_certificate(pem.encode()) if pem else None
    signers = [authority for authority in trusted if certificate and is_signed_by(certificate, authority)]
    names = [authority_name(authority) for authority in trusted[: AUTHORITIES_MAX - 1]]
    return (authority_name(signers[0]) if signers else "", *names)


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the host's names and addresses that the certificate states."""
    try:
        alternative_names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = [str(address) for address in alternative_names.get_values_for_type(x509.IPAddress)]
    return (*alternative_names.get_values_for_type(x509.DNSName), *addresses)


def node_of(certificate: x509.Certificate) -> str:
    """Return the node that the certificate was issued for; "" where it is not a node's."""
    return next((uri.removeprefix(NODE_URI) for uri in _uris(certificate) if uri.startswith(NODE_URI)), "")


def is_head_certificate(certificate: x509.Certificate) -> bool:
    """Say whether the certificate is the head's."""
    return HEAD_URI in _uris(certificate)


def _uris(certificate: x509.Certificate) -> list[str]:
    """Return the URIs in the certificate."""
    try:
        alternative_names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return alternative_names.get_values_for_type(x509.UniformResourceIdentifier)


def is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Say whether the CA has signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # ValueError, TypeError, InvalidSignature: no
        return False
    return True


def _issue(
    authority: Authority, name: str, alternative: x509.SubjectAlternativeName, now: datetime, days: float
) -> bytes:
    """Sign a certificate with a new key; return both in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    ends = min(now + timedelta(days=days), authority.certificate.not_valid_after_utc)
    issuer = authority.certificate.subject
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _start_builder(_distinguished_name(name[:_COMMON_NAME_MAX]), issuer, key, now, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(alternative, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
    )
    certificate = builder.sign(authority.key, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM) + _private_pem(key)


def _start_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    """Start a certificate with the fields that all of ours have."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends) - CLOCKS)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _distinguished_name(name: str) -> x509.Name:
    """Build the subject name of a certificate."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, _ORGANISATION),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Build the key usage of a CA, or of a certificate that signs none."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    """Return the name as an IP address where it is one, else as a DNS name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the private key in PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
