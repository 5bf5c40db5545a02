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
* Keys, passes and warrants do not stand in the events of the log: the key comes with the enrolment, the warrant beside
  the membership, passes from the agent.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography import x509

from unicrond.agents.protocol.memory_exchange import BadPass as BadPass
from unicrond.agents.protocol.messages import GroupMembership, Passes
from unicrond.events.trust.certificates import CLOCKS, BadCertificate, first_certificate, node_of
from unicrond.events.trust.keys import Key
from unicrond.events.trust.membership_certificates import verify_warrant
from unicrond.events.trust.signing import BadSignature, Signer, verify_signed
from unicrond.events.vocabulary import Count, Name

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


class Credentials:
    """A node's certificate, its private key, and the CA, from its key file. Raises BadCertificate where that carries
    none."""

    def __init__(self, key: Key, path: Path) -> None:
        """Take the key and the `path` of its file, from which TLS reads the certificate."""
        self.ca = key.ca
        self._authority = first_certificate(key.ca.encode())
        self._signer = Signer(key.pem.encode())
        self.node = node_of(self._signer.certificate)
        self._path = path
        if not self.node:
            raise BadCertificate("it is not the certificate of a node")

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for the server of this node's memory. Raise OSError (ssl.SSLError)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # each request has a connection of its own, and none is resumed
        context.load_cert_chain(self._path)
        return context

    def passes(self, peers: tuple[str, ...], task: str, warrant: str, now: datetime) -> Passes:
        """Sign a pass for each of the peers. `warrant`: that of the membership, with this node's place."""
        ends_s = int(now.timestamp()) + VALID_S
        texts = [(peer, self._signed(Claims(self.node, peer, task, ends_s))) for peer in peers]
        return Passes(ca=self.ca, by_node=tuple(texts), warrant=warrant)

    def with_passes(self, membership: GroupMembership, task: str, now: datetime) -> GroupMembership:
        """Return the membership as a worker of the task needs it: with this node's passes to its peers."""
        peers = tuple(peer.node for peer in membership.peers)
        return msgspec.structs.replace(membership, passes=self.passes(peers, task, membership.warrant, now), warrant="")

    def admit(self, text: str, task: str, now: datetime | None = None) -> Admitted:
        """Return the bearer of the text: a pass for this node and the task, a dot and its warrant. Raise BadPass."""
        signed, _, warrant = text.partition(".")
        claims = read_pass(signed, self._authority, now or datetime.now(UTC))
        if claims.peer != self.node:
            raise BadPass(f"the pass is for node {claims.peer}")
        if claims.task != task:
            raise BadPass(f"the pass is for task {claims.task}")
        if not warrant:
            raise BadPass(f"node {claims.node} has no warrant for task {task}")
        try:
            return Admitted(claims.node, verify_warrant(warrant, claims.node, task, self._authority))
        except BadSignature as error:
            raise BadPass(str(error)) from None

    def _signed(self, claims: Claims) -> str:
        return self._signer.sign(_PURPOSE, msgspec.msgpack.encode(claims))


def read_pass(text: str, authority: x509.Certificate, now: datetime) -> Claims:
    """Return the claims of a pass whose signature, certificate and time are right. Raise BadPass."""
    try:
        signed, certificate = verify_signed(_PURPOSE, text, authority)
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
