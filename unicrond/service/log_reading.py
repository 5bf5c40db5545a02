"""Reading workers' logs from the nodes that have them, over NATS request and reply (events/logs_request.py)."""

from __future__ import annotations

from typing import Any

from events.log import LogError
from events.logs_request import MAX_LOG_BYTES, BadLogsMessage, LogsRequest, decode_reply, encode, logs_subject
from events.nats_connection import Connection
from unicrond.core.state import ClusterState

_TIMEOUT_S = 3.0
_DEFAULT_TAIL_BYTES = 16 * 1024


class LogsUnavailable(RuntimeError):
    """The node did not answer, or has no such log."""


class LogReader:
    """Asks agents for pieces of logs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def read(
        self, state: ClusterState, task: str, rank: int | None, tail_bytes: int | None, offset: int | None
    ) -> dict[str, Any]:
        """A piece of the log of the task's rank (default 0): worker, node, next offset, text.

        Raises LookupError for an unknown task or rank, LogsUnavailable where its node does not answer.
        """
        worker, node = _worker_of(state, task, rank or 0)
        request = LogsRequest(
            task=task,
            worker=worker,
            tail_bytes=min(max(tail_bytes or _DEFAULT_TAIL_BYTES, 1), MAX_LOG_BYTES),
            offset=offset,
        )
        try:
            message = await self._connection.request(logs_subject(node), encode(request), timeout_s=_TIMEOUT_S)
            reply = decode_reply(message.data)
        except (LogError, BadLogsMessage) as error:
            raise LogsUnavailable(f"node {node} does not send its logs: {error}") from None
        if reply.error:
            raise LogsUnavailable(reply.error)
        return {
            "worker": worker,
            "node": node,
            "offset": reply.next_offset,
            "text": reply.data.decode(errors="replace"),
        }


def _worker_of(state: ClusterState, name: str, rank: int) -> tuple[str, str]:
    """(worker, node) of the task's rank: of the newest membership, also when its workers have ended."""
    task = state.tasks.get(name)
    if task is None:
        raise LookupError(f"task: no task {name}; see `unicronctl tasks`")
    members = task.membership.members if task.membership is not None else ()
    known = [(m.worker, m.node) for m in members] or [(w.worker, w.node) for w in task.workers.values()]
    if not known:
        raise LookupError(f"task: no worker of {name} has run yet; see `unicronctl tasks`")
    if rank >= len(known):
        raise LookupError(f"rank: task {name} has {len(known)} workers; give 0 to {len(known) - 1}")
    return known[rank]
