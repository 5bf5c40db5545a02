"""Keeps the list of logins of the embedded NATS server as the folded log says.

Rules
-----
* People enrol and revoke nodes by requests that stand in the log; the state lists the nodes' keys. This tells the
  server, at once and without a restart, and keeps the list in a file beside the server's store: a server that starts
  before the log is folded lets in who was let in before.
* The login of a node that floods the log ends at once, before the log says so (fuses.py).
* A login that was never used ends after its time: this asks for it, by a request like a person's.
* The head that has the server tells it, whether it leads or stands by; the one that leads asks.
* While a node gets a new key the one before holds too, as the log says. A key of this machine (coordinator, API,
  reader, operator) is read again when its file changes; the one before holds for SIDE_BY_SIDE_S. The shared login's
  password is the first in its file, as soon as that has changed.
* On a NATS server of one's own the list is the operator's (`unicrond nats-config`); here nothing is told to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from unicrond.core.state.alarms import Alarm
from unicrond.core.state.state import ClusterState, NodeLogin, NodeStatus
from unicrond.events.host.file_versions import FileVersion, file_version
from unicrond.events.nats.login import Login
from unicrond.events.nats.server import ServerError
from unicrond.events.trust.keys import BadKey, read_key
from unicrond.events.trust.logins import BadLogin, User, agent_login
from unicrond.events.vocabulary import NodeRevoked
from unicrond.service.trust.fuses import Fuses

log = logging.getLogger("unicrond")

LOOK_EVERY_S = 0.25
#: So long a key of the head's own machine holds beside the one that replaces it.
SIDE_BY_SIDE_S = 60.0


class LoginServer(Protocol):
    """An embedded server whose list of logins can change."""

    async def let_in(self, users: Sequence[User]) -> None:
        """Replace the list of logins (see EmbeddedServer)."""
        ...


class RoleLogins:
    """The logins of this machine whose keys are in `directory`. `users`: as they were at the start."""

    def __init__(self, directory: Path, users: Sequence[User]) -> None:
        self._paths = {user.login: directory / f"{user.login}.key" for user in users}
        self._users = {user.login: user for user in users}
        self._versions = {login: file_version(path) for login, path in self._paths.items()}
        self._previous: list[tuple[User, int]] = []

    def users(self, now_us: int) -> list[User]:
        """Return the logins that hold now."""
        for login, path in self._paths.items():
            version = file_version(path)
            if version != self._versions[login]:
                self._versions[login] = version
                self._load(login, path, now_us)
        self._previous = [(user, until_us) for user, until_us in self._previous if until_us > now_us]
        newest = list(self._users.values())
        return [*newest, *dict.fromkeys(user for user, _ in self._previous if user not in newest)]

    def _load(self, login: str, path: Path, now_us: int) -> None:
        try:
            user = read_key(path).user
        except BadKey as error:
            log.warning("nats.keys: %s; the key before stays in use", error)
            return
        if user.login == login and user != self._users[login]:
            self._previous.append((self._users[login], now_us + int(SIDE_BY_SIDE_S * 1e6)))
            self._users[login] = user
            log.info("the key of %s has changed; an embedded server takes both for %g s", login, SIDE_BY_SIDE_S)


class NodeLogins:
    """Keeps the server's logins as the log says. `roles`: the logins that are no agents'. `server`: None where it is
    not ours. `ask`: append a request.

    `fuses`: which logins end at once. `shared`: the login that NATS still accepts too, which may do everything.
    """

    def __init__(
        self,
        roles: RoleLogins,
        server: LoginServer | None,
        path: Path,
        state: Callable[[], ClusterState],
        ask: Callable[[NodeRevoked], Awaitable[None]],
        now_us: Callable[[], int],
        leads: Callable[[], bool] = lambda: True,
        *,
        fuses: Fuses,
        shared: Login | None = None,
    ) -> None:
        self._roles = roles
        self._server = server
        self._path = path
        self._state = state
        self._ask = ask
        self._now_us = now_us
        self._leads = leads
        self._fuses = fuses
        self._shared = shared
        self._previous_alarms: list[Alarm] = []
        #: Why the server's list is not the log's; "" where it is.
        self.trouble = ""

    async def run(self) -> None:
        """Keep the server's list up to date, until cancelled. To be started once the log is folded."""
        current: tuple[Mapping[str, NodeLogin], list[User], FileVersion | None] | None = None
        change_us = 0
        ended: list[NodeLogin] = []
        while True:
            self._fuses.flooded.clear()
            logins, now_us = self._state().logins, self._now_us()
            roles, password = self._roles.users(now_us), self._password_version()
            floods = self._fuses.look() if self._leads() else {}
            is_current = current is not None and current[0] is logins and current[1:] == (roles, password)
            if (floods or not is_current or now_us >= change_us) and await self._tell(roles, logins, now_us):
                current, change_us = (logins, roles, password), next_change_us(logins, now_us)
            for node, reason in floods.items():
                log.error("the login of node %s ends: %s", node, reason)
                await self._ask(NodeRevoked(node=node, reason=reason))
            for node in expired(logins, now_us) if self._leads() else ():
                if logins[node] not in ended:  # else it is asked for
                    ended.append(logins[node])
                    log.warning("the key of node %s was not used in time: it ends", node)
                    await self._ask(NodeRevoked(node=node, reason="the key was not used in time"))
            self._say()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._fuses.flooded.wait()

    def _password_version(self) -> FileVersion | None:
        """Return which content the file with the shared login's password has; None where there is none."""
        path = self._shared.password_file if self._shared is not None else None
        return file_version(path) if path is not None else None

    def alarms(self) -> list[Alarm]:
        """Return what a person has to do about logins."""
        text = f"NATS does not know the newest logins: {self.trouble}"
        alarms = [Alarm("logins-stale", text)] if self.trouble else []
        return [*alarms, Alarm("logins-shared", migration_line(self._state()))] if self._shared is not None else alarms

    def _say(self) -> None:
        """Log the alarms that are new."""
        alarms = self.alarms()
        for line in alarms:
            if line not in self._previous_alarms:
                log.error("ALARM: %s", line)
        self._previous_alarms = alarms

    async def _tell(self, roles: Sequence[User], logins: Mapping[str, NodeLogin], now_us: int) -> bool:
        """Let these in, each node with all its keys that hold now; return whether the server does."""
        users = [
            User(agent_login(node), key)
            for node, login in logins.items()
            if not self._fuses.has_blown(node)
            for key in login.keys(now_us)
        ]
        if self._server is None:
            return True
        try:
            # First: while a node floods the disk, to write there takes long.
            await self._server.let_in([*roles, *users])
            await asyncio.to_thread(remember, self._path, users)
        except (ServerError, OSError) as error:
            self.trouble = str(error)
            return False
        self.trouble = ""
        return True


def next_change_us(logins: Mapping[str, NodeLogin], now_us: int) -> int:
    """Return when the next key ends that holds beside a newer one."""
    ends_us = [key.until_us for login in logins.values() for key in login.previous if key.until_us > now_us]
    return min(ends_us, default=sys.maxsize)


def expired(logins: Mapping[str, NodeLogin], now_us: int) -> list[str]:
    """Return the nodes whose keys were not used in time."""
    return [
        node for node, login in logins.items() if login.expires_us and not login.is_used and login.expires_us <= now_us
    ]


def without_key(state: ClusterState) -> list[str]:
    """Return the nodes of the cluster that are not enrolled."""
    return [name for name, node in state.nodes.items() if node.status is NodeStatus.UP and name not in state.logins]


def migration_line(state: ClusterState) -> str:
    """Return what stands in the way of `auth: keys`, in one line."""
    missing = without_key(state)
    if not missing and not any(node.status is NodeStatus.UP for node in state.nodes.values()):
        return "NATS accepts the shared login, which may do everything: enroll the nodes, then set nats.auth to keys"
    if not missing:
        return "NATS accepts the shared login, though every node has a key: set nats.auth to keys"
    names = ", ".join([*missing[:3], *(["..."] if len(missing) > 3 else [])])
    nodes = "1 node" if len(missing) == 1 else f"{len(missing)} nodes"
    return f"NATS accepts the shared login, which may do everything: enroll the {nodes} without a key ({names})"


def remember(path: Path, users: Sequence[User]) -> None:
    """Write the list for the next start. Raises OSError."""
    new = path.with_suffix(".new")
    text = "".join(f"{user.login} {user.key}\n" for user in users)
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def remembered(path: Path) -> list[User]:
    """Return the agents' logins of the last time, without those that cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    users = []
    for line in lines:
        login, _, key = line.partition(" ")
        try:
            users.append(User(agent_login(login.removeprefix(agent_login("x")[:-1])), key))
        except BadLogin:
            log.warning("%s: ignoring %r", path, line)
    return users
