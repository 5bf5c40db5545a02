"""What is signed with the key of a certificate of the cluster's CA, and carries that certificate: passes of nodes
(agents/memory/peer_tokens.py) and warrants of the head (membership_certificates.py). Needs `cryptography`."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from unicrond.events.trust.certificates import BadCertificate, first_certificate, is_signed_by

_TEXT_MAX = 4096
_CURVE = ec.ECDSA(hashes.SHA256())
_PRIVATE = b"-----BEGIN PRIVATE KEY-----"


class BadSignature(ValueError):
    """The text is not what its certificate's owner has signed; it says why."""


class _SignedText(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    claims: bytes
    certificate: bytes
    signature: bytes


_text_decoder = msgspec.msgpack.Decoder(_SignedText)


class Signer:
    """A certificate and its private key, from PEM that holds both. Raises BadCertificate."""

    def __init__(self, pem: bytes) -> None:
        self.certificate = first_certificate(pem)
        begin = pem.find(_PRIVATE)
        try:
            private_key = serialization.load_pem_private_key(pem[begin:] if begin >= 0 else b"", None)
        except (ValueError, TypeError):
            raise BadCertificate("its key is not a private key in PEM without a password") from None
        if not isinstance(private_key, ec.EllipticCurvePrivateKey):
            raise BadCertificate("its key is of another kind than unicrond's")
        self._secret = private_key
        self._der = self.certificate.public_bytes(serialization.Encoding.DER)

    def sign(self, purpose: str, claims: bytes) -> str:
        """Sign the claims; return claims, certificate and signature as text. `purpose`: one word that is signed too."""
        signature = self._secret.sign(_purpose(purpose) + claims, _CURVE)
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(_SignedText(claims, self._der, signature))).decode()


def verify_signed(purpose: str, text: str, authorities: Sequence[x509.Certificate]) -> tuple[bytes, x509.Certificate]:
    """Verify a text that `Signer.sign` made with a certificate of one of these CAs; return its claims and its
    certificate.

    The caller checks whose certificate it is, and whether it is valid now. Raises BadSignature.
    """
    if len(text) > _TEXT_MAX:
        raise BadSignature(f"the {purpose} is too long")
    try:
        signed = _text_decoder.decode(base64.urlsafe_b64decode(text))
        certificate = x509.load_der_x509_certificate(signed.certificate)
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm, msgspec.MsgspecError):
        raise BadSignature(f"it is not a {purpose}") from None
    if not any(is_signed_by(certificate, authority) for authority in authorities):
        raise BadSignature(f"the certificate of the {purpose} is of another CA")
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise BadSignature(f"the {purpose} has a certificate of another kind")
    try:
        key.verify(signed.signature, _purpose(purpose) + signed.claims, _CURVE)
    except InvalidSignature:
        raise BadSignature(f"the signature of the {purpose} is wrong") from None
    return signed.claims, certificate


def _purpose(purpose: str) -> bytes:
    return f"unicrond {purpose} 1\0".encode()
