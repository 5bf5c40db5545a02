"""The user that a process runs as."""

from __future__ import annotations

import msgspec

from unicrond.events.vocabulary import Count, Positive, Text


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user of this node, as a task runs under it. `groups`: all of the user's."""

    name: Text
    uid: Positive
    gid: Count
    groups: tuple[Count, ...]
    home: Text
