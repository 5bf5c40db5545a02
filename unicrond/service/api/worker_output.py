"""Reading workers' logs, stacks and marks on their nodes, over NATS request and reply (worker_queries.py)."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from nats.aio.msg import Msg

from unicrond.core.state.state import ClusterState, Incident, NodeStatus
from unicrond.events.log.event_log import LogError
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.request_reply import wait_for_answer
from unicrond.events.queries.worker_queries import (
    ANSWERS,
    MAX_LOG_BYTES,
    BadLogsMessage,
    LogsReply,
    LogsRequest,
    WorkerMark,
    answer_subject,
    decode_flight,
    decode_marks,
    decode_reply,
    encode,
    logs_subject,
)

_TIMEOUT_S = 3.0
_STACKS_TIMEOUT_S = 8.0
#: Up to so many nodes are asked for a log when the state does not know which node has it.
_NODES_ASKED_MAX = 512
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
        self,
        state: ClusterState,
        task: str,
        rank: int | None = None,
        tail_bytes: int | None = None,
        offset: int | None = None,
        worker: str | None = None,
    ) -> dict[str, Any]:
        """Return a piece of the log of the task's rank (default 0), or of `worker`: worker, node, next offset, text.

        If the state no longer knows the worker, all nodes that are up are asked for its log; for a task that has never
        formed a group, the newest worker with a log is taken. Raises LookupError for an unknown task or rank,
        LogsUnavailable where no node has the log.
        """
        _require_task(state, task)
        tail_bytes = min(max(tail_bytes or _DEFAULT_TAIL_BYTES, 1), MAX_LOG_BYTES)
        worker, node = _place_of(state, task, worker) if worker else _of_rank(state, task, rank or 0)
        request = LogsRequest(task=task, worker=worker, tail_bytes=tail_bytes, offset=offset)
        if node is None:
            reply = await self._look_for(state, request)
        else:
            reply = await self._reply(node, request, _TIMEOUT_S)
        if reply.error:
            raise LogsUnavailable(reply.error)
        return {
            "worker": reply.worker,
            "node": reply.node,
            "offset": reply.next_offset,
            "text": reply.data.decode(errors="replace"),
        }

    async def stacks(self, state: ClusterState, task: str, rank: int) -> dict[str, Any]:
        """Return what the task's rank is doing: worker, node, pid, `text` of its threads' stacks, `collectives` of its
        flight recorder. Where one of the two cannot be had, `no_stacks` or `no_flight` says why. Raises as `read` does,
        and LogsUnavailable where neither can be had."""
        _require_task(state, task)
        worker, node = _of_rank(state, task, rank)
        if worker is None or node is None:
            raise LookupError(f"task: no worker of {task} runs; see `unicronctl workers`")
        record = state.tasks[task].workers.get(worker)
        requests = (
            LogsRequest(task=task, worker=worker, stacks=True),
            LogsRequest(task=task, worker=worker, flight=True),
        )
        stacks, flight = await asyncio.gather(
            *(self._reply(node, request, _STACKS_TIMEOUT_S) for request in requests), return_exceptions=True
        )
        text, no_stacks = _data(node, stacks)
        recorded, no_flight = _data(node, flight)
        if no_stacks and no_flight:
            raise LogsUnavailable(no_stacks)
        try:
            collectives = decode_flight(recorded) if recorded else []
        except BadLogsMessage as error:
            collectives, no_flight = [], f"node {node}: {error}"
        body = {"worker": worker, "node": node, "pid": record.pid if record else 0}
        body |= {"text": text.decode(errors="replace"), "no_stacks": no_stacks}
        return {**body, "collectives": collectives, "no_flight": no_flight}

    async def marks(self, state: ClusterState, task: str) -> dict[str, Any]:
        """Return where each worker of the task is: {"marks": {worker: WorkerMark}, "silent": {node: reason}}. Raises
        LookupError.

        Nodes that do not answer are silent; so are those beyond the first _NODES_ASKED_MAX.
        """
        _require_task(state, task)
        membership = state.tasks[task].membership
        nodes = list(dict.fromkeys(member.node for member in membership.members)) if membership else []
        request = LogsRequest(task=task, marks=True)
        targets = nodes[:_NODES_ASKED_MAX]
        replies = await asyncio.gather(
            *(self._reply(node, request, _TIMEOUT_S) for node in targets), return_exceptions=True
        )
        marks: dict[str, WorkerMark] = {}
        silent = dict.fromkeys(nodes[_NODES_ASKED_MAX:], "not asked: the task is too large")
        for node, reply in zip(targets, replies, strict=True):
            try:
                if isinstance(reply, BaseException):
                    raise reply
                if reply.error:
                    raise LogsUnavailable(_too_old(node) if "unknown field" in reply.error else reply.error)
                marks |= {mark.worker: mark for mark in decode_marks(reply.data)}
            except (LogsUnavailable, BadLogsMessage) as error:
                silent[node] = str(error)
        return {"marks": marks, "silent": silent}

    async def _look_for(self, state: ClusterState, request: LogsRequest) -> LogsReply:
        """Return the reply of the node that has the log, or the newest of the task's; else what the event log says."""
        up = [node.name for node in state.nodes.values() if node.status is NodeStatus.UP][:_NODES_ASKED_MAX]
        replies = await asyncio.gather(*(self._reply(node, request, _TIMEOUT_S) for node in up), return_exceptions=True)
        logs = [reply for reply in replies if isinstance(reply, LogsReply) and not reply.error]
        if logs:
            return max(logs, key=lambda reply: int((reply.worker or "0").rpartition(".")[2]))
        label = f"worker {request.worker}" if request.worker else f"any worker of {request.task}"
        incident = _quoting_incident(state, request.task, request.worker)
        if incident is None:
            raise LogsUnavailable(f"no node that is up has a log of {label}; see `unicronctl describe task`")
        text = f"(no node that is up has a log of {label}; this is in the event log)\n{incident.log_tail}\n"
        return LogsReply(node=incident.node, worker=incident.worker, data=text.encode()[:MAX_LOG_BYTES])

    async def _reply(self, node: str, request: LogsRequest, timeout_s: float) -> LogsReply:
        try:
            return await self.ask(node, encode(request), timeout_s)
        except LogsUnavailable as error:
            raise LogsUnavailable(f"node {node} does not send its logs: {error}") from None

    async def ask(self, node: str, body: bytes, timeout_s: float) -> LogsReply:
        """Return the node's answer to any request. Raises LogsUnavailable."""
        try:
            return decode_reply(await self._ask(node, body, timeout_s))
        except (LogError, BadLogsMessage) as error:
            raise LogsUnavailable(str(error)) from None

    async def _ask(self, node: str, body: bytes, timeout_s: float) -> bytes:
        """Return the answer's body. Raises LogError where none comes."""
        async with self._listening:
            if not self._listens:
                await self._connection.subscribe(ANSWERS, self._on_answer)
                self._listens = True
        subject = answer_subject(node, secrets.token_hex(16))
        answer = self._waiting[subject] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                session = await self._connection.session()
                await session.publish(logs_subject(node), body, reply=subject)
            if not await wait_for_answer(answer, timeout_s):
                raise LogError(f"no answer within {timeout_s:g} s")
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


def _data(node: str, reply: LogsReply | BaseException) -> tuple[bytes, str]:
    """Return the reply's data, and why there is none."""
    if isinstance(reply, LogsUnavailable):
        return b"", str(reply)
    if isinstance(reply, BaseException):
        raise reply
    if "unknown field" in reply.error:
        return b"", _too_old(node)
    return reply.data, reply.error


def _too_old(node: str) -> str:
    return f"node {node} runs an agent that is too old for this; upgrade it"


def _require_task(state: ClusterState, name: str) -> None:
    if name not in state.tasks:
        raise LookupError(f"task: no task {name}; see `unicronctl tasks`")


def _of_rank(state: ClusterState, name: str, rank: int) -> tuple[str | None, str | None]:
    """Return (worker, node) of the task's rank in the newest membership, also when its workers have ended. Both are
    None where the task has never formed a group: its workers have no ranks."""
    task = state.tasks[name]
    members = task.membership.members if task.membership is not None else ()
    if not members and not rank:
        return None, None
    if rank >= len(members):
        had = f"{len(members)} workers; give 0 to {len(members) - 1}" if members else "formed no group yet; give 0"
        raise LookupError(f"rank: task {name} has {had}, or --worker as `unicronctl workers` names it")
    return members[rank].worker, members[rank].node


def _place_of(state: ClusterState, name: str, worker: str) -> tuple[str, str | None]:
    """Return (worker, node); the node is None where the state does not know it any more."""
    task = state.tasks[name]
    if worker.rpartition(".")[0] != name or not worker.rpartition(".")[2].isdecimal():
        raise LookupError(
            f"worker: {worker[:80]} is not a worker of task {name}; they are called {name}.1, {name}.2, ..."
        )
    if worker in task.workers:
        return worker, task.workers[worker].node
    members = task.membership.members if task.membership is not None else ()
    return worker, next((member.node for member in members if member.worker == worker), None)


def _quoting_incident(state: ClusterState, task: str, worker: str | None) -> Incident | None:
    """Return the newest incident that quotes the end of the log of the worker, or of any of the task's."""
    incidents = [*state.closed_incidents, *state.incidents.values()]
    of_it = [incident for incident in incidents if incident.log_tail and incident.worker.rpartition(".")[0] == task]
    return next((incident for incident in reversed(of_it) if worker in (None, incident.worker)), None)
