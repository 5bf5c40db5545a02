"""Reading workers' logs from the nodes that have them, over NATS request and reply (events/logs_request.py)."""

from __future__ import annotations

from typing import Any

from events.log import LogError
from events.logs_request import MAX_LOG_BYTES, BadLogsMessage, LogsRequest, decode_reply, encode, logs_subject
from events.nats_connection import Connection
from unicrond.state import ClusterState, Task, Worker

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

        Raises LookupError where there is no such task or rank, LogsUnavailable where its node does not answer.
        """
        worker = _worker_of(state, task, rank or 0)
        request = LogsRequest(
            task=task,
            worker=worker.worker,
            tail_bytes=min(max(tail_bytes or _DEFAULT_TAIL_BYTES, 1), MAX_LOG_BYTES),
            offset=offset,
        )
        try:
            message = await self._connection.request(logs_subject(worker.node), encode(request), timeout_s=_TIMEOUT_S)
            reply = decode_reply(message.data)
        except (LogError, BadLogsMessage) as error:
            raise LogsUnavailable(f"node {worker.node} does not give its logs: {error}") from None
        if reply.error:
            raise LogsUnavailable(reply.error)
        return {
            "worker": worker.worker,
            "node": worker.node,
            "offset": reply.next_offset,
            "text": reply.data.decode(errors="replace"),
        }


def _worker_of(state: ClusterState, name: str, rank: int) -> Worker:
    task: Task | None = state.tasks.get(name)
    if task is None:
        raise LookupError(f"task: there is no task {name}; see `unicronctl tasks`")
    members = task.membership.members if task.membership is not None else ()
    workers = [task.workers[m.worker] for m in members if m.worker in task.workers] or list(task.workers.values())
    if rank >= len(workers):
        raise LookupError(f"rank: task {name} has {len(workers)} workers; give 0 to {max(0, len(workers) - 1)}")
    return workers[rank]
