"""Warrants: the coordinator's word, for nodes that do not follow a task, on which nodes its membership has.

Rules
-----
* A warrant says the task, the generation and the root of the members' nodes (membership_digest.py). The head signs it
  with the key of its own certificate; no node has one that says it is the head's.
* It goes beside the membership, in a header of the message, on a subject that the coordinator alone may write. It is no
  secret, and no part of the event: a signature follows from nothing in the log, and nothing is folded from headers.
* It has no end in time: a membership may stand for months. Whoever is shown it compares the generation with what it
  keeps of the task. The certificate must have been valid when the warrant was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from cryptography import x509

from unicrond.events.trust import membership_digest as roster
from unicrond.events.trust.certificates import CLOCKS, is_head_certificate
from unicrond.events.trust.signing import BadSignature, Signer, verify_signed
from unicrond.events.vocabulary import Count, Name

_PURPOSE = "warrant"


class Warrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The signed content of a warrant. `root`: the digest of the membership's nodes. `made_s`: seconds since 1970."""

    task: Name
    generation: Count
    root: bytes
    made_s: Count


_warrants = msgspec.msgpack.Decoder(Warrant)


def make_warrant(head: Signer, task: str, generation: int, root: bytes, now: datetime) -> str:
    """Make the text of a warrant. `head`: the head's certificate with its key."""
    claims = msgspec.msgpack.encode(Warrant(task, generation, root, int(now.timestamp())))
    return head.sign(_PURPOSE, claims)


def verify_warrant(text: str, node: str, task: str, authorities: Sequence[x509.Certificate]) -> int:
    """Verify a warrant; return the generation of the task of which the node is a member.

    `text`: the warrant, a dot, the node's place. `authorities`: the CAs of which one has certified the head. Raises
    BadSignature.
    """
    signed, _, place = text.partition(".")
    claims, certificate = verify_signed(_PURPOSE, signed, authorities)
    try:
        warrant = _warrants.decode(claims)
        made_at = datetime.fromtimestamp(warrant.made_s, UTC)
        root = roster.root_by(place, node)
    except (ValueError, OverflowError, OSError, msgspec.MsgspecError) as error:
        raise BadSignature(f"it is not a warrant: {error}") from None
    if not is_head_certificate(certificate):
        raise BadSignature("the warrant is not signed by the head")
    if not certificate.not_valid_before_utc <= made_at <= certificate.not_valid_after_utc + CLOCKS:
        raise BadSignature("the certificate of the head was not valid when it made the warrant")
    if warrant.task != task:
        raise BadSignature(f"the warrant is for task {warrant.task}")
    if warrant.root != root:
        raise BadSignature(f"the warrant is not for node {node}")
    return warrant.generation
