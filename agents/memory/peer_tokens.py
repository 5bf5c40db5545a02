"""Passes: signed tokens by which a node proves, to the node whose memory it asks, that it speaks for a task.

Rules
-----
* The serving node shows its certificate in TLS 1.3: by the cluster's CA it is the intended node, and nobody reads
  along.
* The requester is a worker, which runs code of a task and must not have its node's private key. So its agent signs a
  pass for each peer of a membership: this node, that node, this task, until that time. The pass goes through the TLS
  connection alone; a peer cannot use it at another peer, and for another task it is worth nothing.
* A pass identifies the requester; it does not authorise it. The membership's warrant goes with it
  (events/trust/membership_certificates.py): the head certifies that the node is a member, and of which generation. The
  serving node need not know the task: it gives nothing where it stores a state of a later generation, and accepts none
  of a later one than the warrant's.
* The key's file is read again when it has changed: a certificate of another key or CA is shown from the next connection
  on. While a CA is replaced a key carries both, and each of them counts. Where a new file cannot be used, the content
  before stays.
* Keys, passes and warrants do not stand in the events of the log: the key comes with the enrolment, the warrant beside
  the membership, passes from the agent.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography import x509

from unicrond.agents.protocol.memory_exchange import BadPass as BadPass
from unicrond.agents.protocol.messages import GroupMembership, Passes
from unicrond.events.host.file_versions import FileVersion, file_version
from unicrond.events.trust.certificates import CLOCKS, BadCertificate, all_certificates, node_of
from unicrond.events.trust.keys import BadKey, Key, read_key
from unicrond.events.trust.membership_certificates import verify_warrant
from unicrond.events.trust.signing import BadSignature, Signer, verify_signed
from unicrond.events.vocabulary import Count, Name

logger = logging.getLogger(__name__)

#: A worker may ask a membership's peers long after the membership was sent.
VALID_S = 24 * 3600
_PURPOSE = "pass"


class Claims(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of a pass: node `node` asks node `peer`, until `ends_s` (seconds since 1970)."""

    node: Name
    peer: Name
    task: Name
    ends_s: Count


class Admitted(NamedTuple):
    """The node that a pass proves, and the generation of the task in which it is a member."""

    node: str
    generation: int


_claims = msgspec.msgpack.Decoder(Claims)


class _Content(NamedTuple):
    """The content of a key's file at one time. `ca`: the CAs in PEM, and `authorities` the same, parsed. `context`: for
    the server of the node's memory. `version`: of the file; None: not looked at yet."""

    ca: str
    authorities: tuple[x509.Certificate, ...]
    signer: Signer
    context: ssl.SSLContext
    version: FileVersion | None


class Credentials:
    """A node's certificate, its private key, and the CA, from its key file, which is read again when it changes. Raises
    BadCertificate where that carries none. Any thread may use it."""

    def __init__(self, key: Key, path: Path) -> None:
        """Take the key and the `path` of its file, from which TLS reads the certificate."""
        self._path = path
        self._content = _content_of(key, path, None)
        self.node = node_of(self._content.signer.certificate)

    @property
    def ca(self) -> str:
        """Return the cluster's CA, or while it is replaced both, in PEM."""
        return self._newest().ca

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for the next connection to the server of this node's memory."""
        return self._newest().context

    def passes(self, peers: tuple[str, ...], task: str, warrant: str, now: datetime) -> Passes:
        """Sign a pass for each of the peers. `warrant`: that of the membership, with this node's place."""
        ends_s = int(now.timestamp()) + VALID_S
        content = self._newest()
        texts = [
            (peer, content.signer.sign(_PURPOSE, msgspec.msgpack.encode(Claims(self.node, peer, task, ends_s))))
            for peer in peers
        ]
        return Passes(ca=content.ca, by_node=tuple(texts), warrant=warrant)

    def with_passes(self, membership: GroupMembership, task: str, now: datetime) -> GroupMembership:
        """Return the membership as a worker of the task needs it: with this node's passes to its peers."""
        peers = tuple(peer.node for peer in membership.peers)
        return msgspec.structs.replace(membership, passes=self.passes(peers, task, membership.warrant, now), warrant="")

    def admit(self, text: str, task: str, now: datetime | None = None) -> Admitted:
        """Return the bearer of the text: a pass for this node and the task, a dot and its warrant. Raise BadPass."""
        signed, _, warrant = text.partition(".")
        authorities = self._newest().authorities
        claims = read_pass(signed, authorities, now or datetime.now(UTC))
        if claims.peer != self.node:
            raise BadPass(f"the pass is for node {claims.peer}")
        if claims.task != task:
            raise BadPass(f"the pass is for task {claims.task}")
        if not warrant:
            raise BadPass(f"node {claims.node} has no warrant for task {task}")
        try:
            return Admitted(claims.node, verify_warrant(warrant, claims.node, task, authorities))
        except BadSignature as error:
            raise BadPass(str(error)) from None

    def problem(self, warrant: str, task: str, generation: int) -> str:
        """Return why this node's peers would not take this warrant, with the node's place; "" where they would."""
        try:
            proven = verify_warrant(warrant, self.node, task, self._newest().authorities)
        except BadSignature as error:
            return str(error)
        return "" if proven == generation else f"the warrant is of generation {proven}, not {generation}"

    def _newest(self) -> _Content:
        """Return the content of the file, or that before where it cannot be used."""
        content, version = self._content, file_version(self._path)
        if version is None or version == content.version:
            return content
        try:
            newer = _content_of(read_key(self._path), self._path, version)
            if node_of(newer.signer.certificate) != self.node:
                raise BadCertificate("it is another node's")
        except (BadKey, BadCertificate) as error:
            logger.warning("%s: its certificate cannot be used (%s); the one before stays in use", self._path, error)
            newer = content._replace(version=version)
        self._content = newer
        return newer


def _content_of(key: Key, path: Path, version: FileVersion | None) -> _Content:
    """Return the content of a node's key at `path`. Raise BadCertificate."""
    authorities = tuple(all_certificates(key.ca.encode()))
    signer = Signer(key.pem.encode())
    if not node_of(signer.certificate):
        raise BadCertificate("it is not the certificate of a node")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # each request has a connection of its own, and none is resumed
    try:
        context.load_cert_chain(path)
    except OSError as error:  # ssl.SSLError is one
        raise BadCertificate(f"TLS does not take it: {error}") from None
    return _Content(key.ca, authorities, signer, context, version)


def read_pass(text: str, authorities: Sequence[x509.Certificate], now: datetime) -> Claims:
    """Return the claims of a pass whose signature, time and certificate, of one of these CAs, are right. Raise
    BadPass."""
    try:
        signed, certificate = verify_signed(_PURPOSE, text, authorities)
        claims = _claims.decode(signed)
    except BadSignature as error:
        raise BadPass(str(error)) from None
    except msgspec.MsgspecError:
        raise BadPass("it is not a pass") from None
    node = node_of(certificate)
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc + CLOCKS:
        raise BadPass(f"the certificate of node {node} has expired; enroll it again")
    if not node or node != claims.node:
        raise BadPass(f"the pass is of node {claims.node}, its certificate is not")
    if claims.ends_s < now.timestamp():
        raise BadPass("the pass has expired; compare the clocks of both nodes")
    return claims
