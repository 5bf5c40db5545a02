"""Reading workers' logs from the nodes that have them, over NATS request and reply (events/logs_request.py)."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from nats.aio.msg import Msg

from events.log import LogError
from events.logs_request import (
    ANSWERS,
    MAX_LOG_BYTES,
    BadLogsMessage,
    LogsRequest,
    answer_subject,
    decode_reply,
    encode,
    logs_subject,
)
from events.nats_connection import Connection
from events.nats_inquiry import came
from unicrond.core.state import ClusterState

_TIMEOUT_S = 3.0
_DEFAULT_TAIL_BYTES = 16 * 1024


class LogsUnavailable(RuntimeError):
    """The node did not answer, or has no such log."""


class LogReader:
    """Asks agents for pieces of logs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._listening = asyncio.Lock()
        self._listens = False

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
            reply = decode_reply(await self._ask(node, encode(request)))
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

    async def _ask(self, node: str, body: bytes) -> bytes:
        """The answer's body. LogError where none comes."""
        async with self._listening:
            if not self._listens:
                await self._connection.subscribe(ANSWERS, self._on_answer)
                self._listens = True
        subject = answer_subject(node, secrets.token_hex(16))
        answer = self._waiting[subject] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                session = await self._connection.session()
                await session.publish(logs_subject(node), body, reply=subject)
            if not await came(answer, _TIMEOUT_S):
                raise LogError(f"no answer within {_TIMEOUT_S:g} s")
        except TimeoutError:
            raise LogError(f"no connection to {self._connection.urls}") from None
        finally:
            del self._waiting[subject]
        message = answer.result()
        if (message.headers or {}).get("Status") == "503":
            raise LogError("its agent does not listen")
        return bytes(message.data)

    async def _on_answer(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)


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
