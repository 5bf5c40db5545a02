"""The base of all messages of messages.py."""

from __future__ import annotations

import msgspec


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """Base of all messages; the class name is the wire tag, unless `tag` names another. A field at its default is left
    out: processes of a version that lacks it may be at the other end (a fork server and its workers outlive their
    agent)."""
