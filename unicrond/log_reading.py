"""Reading workers' logs from the nodes that have them, over NATS request and reply."""

from __future__ import annotations

from typing import Any

from events.nats_connection import Connection
from unicrond.state import ClusterState


class LogsUnavailable(RuntimeError):
    """The node did not answer."""


class LogReader:
    """Asks agents for pieces of logs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(
        self, state: ClusterState, task: str, rank: int | None, tail_bytes: int | None, offset: int | None
    ) -> dict[str, Any]:
        """A piece of the log of the task's rank. Raises LookupError, LogsUnavailable."""
        raise LogsUnavailable("not wired yet")
