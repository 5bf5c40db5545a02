"""What is signed with the key of a certificate of the cluster's CA, and carries that certificate: passes of nodes
(agents/passes.py) and warrants of the head (warrants.py). Needs `cryptography`."""

from __future__ import annotations

import base64

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from events.certificates import BadCertificate, first_in, is_of

_TEXT_MAX = 4096
_CURVE = ec.ECDSA(hashes.SHA256())
_PRIVATE = b"-----BEGIN PRIVATE KEY-----"


class BadSignature(ValueError):
    """The text is not what its certificate's owner has signed; it says why."""


class _Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    claims: bytes
    certificate: bytes
    signature: bytes


_signed = msgspec.msgpack.Decoder(_Signed)


class Signer:
    """A certificate and its private key, from PEM that holds both. Raises BadCertificate."""

    def __init__(self, pem: bytes) -> None:
        self.certificate = first_in(pem)
        begin = pem.find(_PRIVATE)
        try:
            secret = serialization.load_pem_private_key(pem[begin:] if begin >= 0 else b"", None)
        except (ValueError, TypeError):
            raise BadCertificate("its key is not a private key in PEM without a password") from None
        if not isinstance(secret, ec.EllipticCurvePrivateKey):
            raise BadCertificate("its key is of another kind than unicrond's")
        self._secret = secret
        self._der = self.certificate.public_bytes(serialization.Encoding.DER)

    def signed(self, what: str, claims: bytes) -> str:
        """The claims, the certificate and the signature. `what`: what they make, in one word, which is signed too."""
        signature = self._secret.sign(_purpose(what) + claims, _CURVE)
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(_Signed(claims, self._der, signature))).decode()


def opened(what: str, text: str, authority: x509.Certificate) -> tuple[bytes, x509.Certificate]:
    """The claims and the certificate of a text that `Signer.signed` made with a certificate of this CA. Whose it is,
    and whether it is valid now, is for the caller to ask. Raises BadSignature."""
    if len(text) > _TEXT_MAX:
        raise BadSignature(f"the {what} is too long")
    try:
        signed = _signed.decode(base64.urlsafe_b64decode(text))
        certificate = x509.load_der_x509_certificate(signed.certificate)
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm, msgspec.MsgspecError):
        raise BadSignature(f"it is not a {what}") from None
    if not is_of(certificate, authority):
        raise BadSignature(f"the certificate of the {what} is of another CA")
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise BadSignature(f"the {what} has a certificate of another kind")
    try:
        key.verify(signed.signature, _purpose(what) + signed.claims, _CURVE)
    except InvalidSignature:
        raise BadSignature(f"the signature of the {what} is wrong") from None
    return signed.claims, certificate


def _purpose(what: str) -> bytes:
    return f"unicrond {what} 1\0".encode()
