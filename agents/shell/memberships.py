"""Prepares memberships for workers: adds passes that this node's key signs, and takes the warrant out.

Rules
-----
* The core remembers the membership of each task; nothing of it is stored here.
* A warrant admits this node to its peers and stays with the agent: a worker gets the passes that the node's key signs
  with it, for its own peers. Without a certificate it gets neither, and states travel in clear.
* An agent whose key carries a certificate that cannot be used does not begin. Later it reads the key
  again when its file has changed (memory/peer_tokens.py).

What a pass is and who accepts it: memory/peer_tokens.py. What travels under it: memory_keeper.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.shell.options import Options
from unicrond.events.trust.keys import BadKey, read_key
from unicrond.events.vocabulary import Name, WorkerId

if TYPE_CHECKING:
    from unicrond.agents.memory.peer_tokens import Credentials  # needs an extra, and so does what it imports


class Memberships:
    """Prepares the memberships of one node's tasks. `memberships()` returns the present ones, by task."""

    def __init__(
        self, memberships: Callable[[], Mapping[Name, GroupMembership]], credentials: Credentials | None
    ) -> None:
        self._memberships = memberships
        self._credentials = credentials

    def for_worker(self, worker: WorkerId, membership: GroupMembership) -> GroupMembership:
        """Return the membership as the worker may see it: with this node's passes, without the warrant."""
        if self._credentials is None:
            return msgspec.structs.replace(membership, warrant="")
        return self._credentials.with_passes(membership, worker.rpartition(".")[0], datetime.now(UTC))

    def warrant(self, task: Name) -> str:
        """Return the warrant of the task's present membership, "" where there is none."""
        membership = self._memberships().get(task)
        return membership.warrant if membership else ""


def credentials_of(options: Options) -> Credentials | None:
    """Return those of the node, where its key carries a certificate and states do not travel in clear by order. Raise
    BadCertificate."""
    from unicrond.agents.memory.peer_tokens import Credentials
    from unicrond.events.trust.certificates import BadCertificate

    path = options.login.key
    if options.states_in_clear or path is None:
        return None
    try:
        key = read_key(path)
        return Credentials(key, path) if key.has_certificate else None
    except (BadKey, BadCertificate) as error:
        raise BadCertificate(f"{path}: its certificate cannot be used ({error}); enroll the node again") from None
