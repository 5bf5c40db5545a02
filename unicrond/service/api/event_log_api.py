"""The part of the HTTP API that reads: the event log, what workers say and do, what agents see of their nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from aiohttp import web

from unicrond.core.state.state import ClusterState
from unicrond.display.event_lines import entry_json
from unicrond.events.log.event_log import EventLog
from unicrond.events.wire.envelope import QuarantinedMessage
from unicrond.intake.tokens import Grant
from unicrond.service.api.http_parts import answer, body_of, error, number_in
from unicrond.service.api.node_checks import ChecksBusy, ChecksRequest, NodeChecks
from unicrond.service.api.own_state import own_state, own_worker
from unicrond.service.api.redaction import Discretion
from unicrond.service.api.worker_output import LogReader, LogsUnavailable

#: How old the marks in an answer may be, in seconds.
MARKS_S = 1.0


class LogApi:
    """The routes that read, over one log and the agents that have the workers' output. `caller`: the grant of the
    request that is being handled."""

    def __init__(
        self, event_log: EventLog, logs: LogReader, state: Callable[[], ClusterState], caller: Callable[[], Grant]
    ) -> None:
        self._event_log = event_log
        self._logs = logs
        self._state = state
        self._caller = caller
        self._checks = NodeChecks(logs)
        self._turn = asyncio.Lock()
        #: The marks of the task that was asked for last, and when they were read.
        self._marks: dict[str, tuple[float, Any]] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that `api.py` adds to its own."""
        return [
            web.get("/v1/events", self.events),
            web.get("/v1/skips", self.skips),
            web.get("/v1/logs/{task}", self.logs),
            web.get("/v1/stacks/{task}", self.stacks),
            web.get("/v1/marks/{task}", self.marks),
            web.post("/v1/checks", self.checks),
        ]

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream server-sent events from the log itself: history after `after`, to `until` or the log's end, or live
        where `follow` is set."""
        after = number_in(request, "after") or 0
        follow = request.query.get("follow", "0") not in ("", "0", "false")
        until = None
        if not follow:
            limit, until = number_in(request, "until"), await self._event_log.last_seq()
            until = until if limit is None else min(limit, until)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        if until is not None and until <= after:
            return response
        with suppress(ConnectionResetError):  # the reader has seen enough
            await self._send(response, after, until)
        return response

    async def _send(self, response: web.StreamResponse, after: int, until: int | None) -> None:
        discretion = Discretion(task.spec for task in self._state().tasks.values())
        async with aclosing(self._event_log.read(after, until_seq=until)) as entries:
            async for entry in entries:
                discretion.see(entry)
                kind = (
                    "QuarantinedMessage"
                    if isinstance(entry, QuarantinedMessage)
                    else type(entry.envelope.event).__name__
                )
                data = msgspec.json.encode(discretion.plain(entry_json(entry))).decode()
                await response.write(f"id: {entry.seq}\nevent: {kind}\ndata: {data}\n\n".encode())

    async def skips(self, _: web.Request) -> web.Response:
        """Answer with the entries that are passed over, and why."""
        return answer({str(seq): reason for seq, reason in (await self._event_log.skips()).items()})

    async def logs(self, request: web.Request) -> web.Response:
        """Answer with a piece of a worker's log, from the node that has it."""
        query = {field: number_in(request, field) for field in ("rank", "tail_bytes", "offset")}
        task, worker, state = request.match_info["task"], request.query.get("worker"), self._visible_state()
        if self._caller().reads_own_alone and task in state.tasks:
            if worker is not None and not own_worker(state, task, worker):
                return error(404, f"worker: {worker[:80]} is no worker of task {task} now; ask with scope read")
            if (
                worker is None and state.tasks[task].membership is None
            ):  # a node would give what it has of an earlier life
                return error(404, f"task: {task} has formed no group yet; try again then")
        try:
            return answer(await self._logs.read(state, task, worker=worker, **query))
        except LookupError as unknown:
            return error(404, str(unknown.args[0]))
        except LogsUnavailable as missing:
            return error(503, str(missing))

    async def marks(self, request: web.Request) -> web.Response:
        """Answer with the phase mark of each worker of a task; the nodes are asked once every MARKS_S at most."""
        task = request.match_info["task"]
        try:
            if task not in self._visible_state().tasks:
                raise LookupError(f"task: no task {task}; see `unicronctl tasks`")
            async with self._turn:
                at_s, marks = self._marks.get(task, (0.0, None))
                if marks is None or time.monotonic() - at_s > MARKS_S:
                    marks = await self._logs.marks(self._state(), task)
                    self._marks = {task: (time.monotonic(), marks)}
        except LookupError as unknown:
            return error(404, str(unknown.args[0]))
        return answer(marks)

    def _visible_state(self) -> ClusterState:
        """Return the state as the caller sees it."""
        state, caller = self._state(), self._caller()
        return own_state(state, caller.owner) if caller.reads_own_alone else state

    async def stacks(self, request: web.Request) -> web.Response:
        """Answer with the stacks of a worker's threads, read by py-spy on its node."""
        try:
            rank = number_in(request, "rank") or 0
            return answer(await self._logs.stacks(self._state(), request.match_info["task"], rank))
        except LookupError as unknown:
            return error(404, str(unknown.args[0]))
        except LogsUnavailable as missing:
            return error(503, str(missing))

    async def checks(self, request: web.Request) -> web.Response:
        """Answer with what the nodes' agents see of themselves, each other and the tasks' storage; takes up to a
        minute."""
        try:
            return answer(await self._checks.look(self._state(), await body_of(request, ChecksRequest)))
        except ChecksBusy as running:
            return error(409, str(running))
