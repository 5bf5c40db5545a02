"""Which of the log's promises do not hold in this cluster, for people: /healthz, `unicronctl status`, the head's log.

With an embedded server all writes are synced and every login is ours; what it cannot survive is its host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from unicrond.events.nats.connection import Connection
from unicrond.events.nats.durability import find_weaknesses
from unicrond.events.nats.login import Login
from unicrond.events.trust.logins import Role

log = logging.getLogger("unicrond")

LOOK_EVERY_S = 60.0
HOST_LOSS = (
    "the log is on the host of the embedded nats-server alone: another head can take over from this process, not from "
    "this host; use three NATS servers (docs/operate/heads.md)"
)


class Promises:
    """The promises that do not hold. `lines`: as of the last look. `is_embedded`: the server is ours, and alone."""

    def __init__(
        self,
        connection: Connection,
        role: Role | None,
        system: Login | None,
        replicas: int,
        *,
        is_embedded: bool,
        has_others: Callable[[], object],
    ) -> None:
        """Take the connection and the logins to ask with. `has_others`: whether other heads run."""
        self._connection = connection
        self._role = role
        self._system = system
        self._replicas = replicas
        self._is_embedded = is_embedded
        self._has_others = has_others
        self.lines: list[str] = []

    async def look(self) -> None:
        """Ask once, and log what is new."""
        before, self.lines = self.lines, await self._ask()
        for line in self.lines:
            if line not in before:
                log.warning("weaker than promised: %s", line)

    async def run(self) -> None:
        """Ask now and then, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ask(self) -> list[str]:
        if self._is_embedded:
            return [HOST_LOSS] if self._has_others() else []
        return await find_weaknesses(self._connection, self._role, self._system, self._replicas)
