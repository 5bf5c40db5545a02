"""Rosters: one digest that stands for the nodes of a membership, and the proof that a node is one of them. Pure.

The names are sorted and cut into groups, as many as a group has names; the root is the digest of the groups' digests.
A node's *place* is its own group and the digests of the others: with 10,000 nodes some 4 KB, and 100 digests to make.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from math import isqrt

import msgspec


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node's place in the digest. `names`: of the node's group. `before`, `after`: the digests of the other groups,
    32 bytes each."""

    names: tuple[str, ...]
    before: bytes
    after: bytes


_places = msgspec.msgpack.Decoder(_Place)


def root(nodes: Iterable[str]) -> bytes:
    """Return the digest of these nodes, 32 bytes. A node that is named twice counts once."""
    return _root(b"".join(map(_digest, _groups(nodes))))


def place_of(node: str, nodes: Iterable[str]) -> str:
    """Return the proof that the node is one of `nodes`; "" where it is not."""
    groups = _groups(nodes)
    index = next((number for number, group in enumerate(groups) if node in group), None)
    if index is None:
        return ""
    digests = [_digest(group) for group in groups]
    place = _Place(groups[index], b"".join(digests[:index]), b"".join(digests[index + 1 :]))
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(place)).decode()


def root_by(place: str, node: str) -> bytes:
    """Return the digest of the nodes among which the node has this place. Raises ValueError where the place is not the
    node's."""
    try:
        proof = _places.decode(base64.urlsafe_b64decode(place))
    except (ValueError, msgspec.MsgspecError):
        raise ValueError("it is not a place") from None
    if node not in proof.names:
        raise ValueError(f"it is not the place of node {node}")
    return _root(proof.before + _digest(proof.names) + proof.after)


def _groups(nodes: Iterable[str]) -> list[tuple[str, ...]]:
    names = sorted(dict.fromkeys(nodes))  # which keeps what order there is: that is soon sorted
    size = isqrt(len(names)) or 1
    return [tuple(names[first : first + size]) for first in range(0, len(names), size)]


def _digest(group: Sequence[str]) -> bytes:
    return hashlib.sha256(b"group\0" + "\0".join(group).encode()).digest()


def _root(digests: bytes) -> bytes:
    return hashlib.sha256(b"root\0" + digests).digest()
