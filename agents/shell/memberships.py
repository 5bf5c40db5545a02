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
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.shell.options import Options
from unicrond.events.host.file_versions import FileVersion, file_version
from unicrond.events.nats.login import Login
from unicrond.events.trust.keys import BadKey, read_key
from unicrond.events.trust.membership_digest import place_of
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

    def problem(self, task: Name, generation: int, warrant: str) -> str:
        """Return why the agent does not take this warrant of a membership; "" where it does, and where it needs none
        because it has no credentials, or a newer membership. The head sends a warrant again whose membership the agent
        has not read yet."""
        membership = self._memberships().get(task)
        if self._credentials is None or (membership is not None and membership.generation > generation):
            return ""
        if membership is None or membership.generation < generation:
            return f"membership {generation} of task {task} has not come yet"
        node = self._credentials.node
        return self._credentials.problem(
            f"{warrant}.{place_of(node, (member.node for member in membership.members))}", task, generation
        )


class KnownAuthorities:
    """Tells the CAs that an agent's files hold, for its heartbeats: Heartbeat.authorities."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._versions: list[FileVersion | None] | None = None
        self._names: tuple[str, ...] = ()

    def __call__(self) -> tuple[str, ...]:
        """Return the names; those of before where a file cannot be read."""
        versions = [file_version(path) for path in self._login.files]
        if versions != self._versions:
            self._versions = versions
            with suppress(ValueError, OSError):  # whoever connects says what is wrong with them
                self._names = self._read()
        return self._names

    def _read(self) -> tuple[str, ...]:
        key = read_key(self._login.key) if self._login.key else None
        if key is not None and key.pem:
            pem, ca = (key.pem if key.has_certificate else ""), key.ca
        else:
            pem, ca = "", self._login.tls_ca.read_text() if self._login.tls_ca else ""
        if not ca:
            return ("",)
        from unicrond.events.trust.certificates import authorities_of  # needs an extra

        return authorities_of(pem, ca)


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
