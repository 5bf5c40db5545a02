"""The HTTP API (aiohttp): read the state, follow the events, submit and cancel tasks.

    GET  /healthz                          no token needed
    GET  /v1/state
    GET  /v1/events?after=SEQ[&follow=1]   server-sent events
    POST /v1/tasks                         a task file's content as JSON
    POST /v1/tasks/NAME/cancel             {"reason"}
    POST /v1/tasks/NAME/reshape            {"tp", "pp", "min_workers", "max_workers", "reason"}
    POST /v1/nodes/NAME/cordon             {"drain", "reason"}
    POST /v1/nodes/NAME/uncordon           {"reason"}
    POST /v1/nodes/NAME/enroll             {"key", "unused_h"}
    POST /v1/nodes/NAME/revoke             {"reason"}
    POST /v1/faults                        see ordering.py; 409 unless the configuration allows it
    GET  /v1/plan/table                    what would be planned after each event that may come next
    POST /v1/plan/whatif                   what would be planned if; changes nothing
    GET  /v1/logs/TASK?rank=R&tail_bytes=N&offset=O
    GET  /metrics                          Prometheus

What people ask for becomes an observation in the log; nothing is changed from here in any other way. Who may ask what:
`access.py`.
JSON knows no NaN, which a loss may be: null stands in its place. Tokens and passwords are hidden (discretion.py);
the digest is that of the state with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta
from msgspec.structs import replace

from events.codec import API_PRODUCER, BadEvent
from events.envelope import Envelope, Quarantined
from events.log import EventLog
from events.logins import BadLogin, agent_login
from events.schemas import NAMES_WHO_ASKS, beyond_schema
from events.vocabulary import (
    AnyRequest,
    NodeCordoned,
    NodeEnrolled,
    NodeRevoked,
    NodeUncordoned,
    PublicKey,
    TaskCancelled,
    TaskSubmitted,
    Text,
)
from unicrond.core.costs import costs_at
from unicrond.core.field_faults import faults
from unicrond.core.ordering import FaultOrder, Refused, ordered
from unicrond.core.planning.problem import ProblemError
from unicrond.core.requests import enrolment_problem
from unicrond.core.reshape_order import ReshapeOrder, asked_for
from unicrond.core.state import Task, TaskStatus
from unicrond.core.state_bytes import digest, to_json
from unicrond.core.survey import worker_mtbf_us
from unicrond.core.what_if import BadChange, Changes, foreseen, what_if
from unicrond.core.work import achieved_waf, delivered_flop
from unicrond.display.event_lines import entry_json
from unicrond.intake.config import Config, is_loopback
from unicrond.intake.task_file import understood
from unicrond.intake.timeouts import contradictions
from unicrond.service.access import Access, NoAccess
from unicrond.service.coordinator import Coordinator
from unicrond.service.discretion import discreet_entry, discreet_state, warnings_of
from unicrond.service.log_reading import LogReader, LogsUnavailable
from unicrond.service.metrics import exposition

T = TypeVar("T", bound=msgspec.Struct)
_ASKED = "requested by an operator"
#: What tells of the whole state and of nothing less: not before the log is folded.
_OF_THE_STATE = ("/v1/state", "/v1/plan/", "/v1/logs/")
#: Digits of a number in a query; no log, rank or file has so many.
_DIGITS_MAX = 15
#: Nesting of a request's JSON; the deepest of ours is four.
_DEPTH_MAX = 32
#: The name of the token that came with the request in hand.
_who: ContextVar[str] = ContextVar("who", default="")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """The routes, over one coordinator."""

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        event_log: EventLog,
        logs: LogReader,
        access: Access | None = None,
        trouble: Callable[[], str] = str,
    ) -> None:
        """`access`: who may ask; None: everybody. `trouble`: why the log takes nothing at this moment; empty where it
        does."""
        self._config = config
        self._coordinator = coordinator
        self._event_log = event_log
        self._logs = logs
        self._access = access or Access()
        self._trouble = trouble
        self._number = 0
        self._metrics = exposition(
            lambda: coordinator.state, coordinator.alarms, lambda: coordinator.fault, trouble, coordinator.kept_back
        )

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard], client_max_size=256 * 1024)
        app.add_routes(
            [
                web.get("/healthz", self.health),
                web.get("/metrics", self.metrics),
                web.get("/v1/state", self.state),
                web.get("/v1/events", self.events),
                web.post("/v1/tasks", self.submit),
                web.post("/v1/tasks/{task}/cancel", self.cancel),
                web.post("/v1/tasks/{task}/reshape", self.reshape),
                web.post("/v1/nodes/{node}/cordon", self.cordon),
                web.post("/v1/nodes/{node}/uncordon", self.uncordon),
                web.post("/v1/nodes/{node}/enroll", self.enroll),
                web.post("/v1/nodes/{node}/revoke", self.revoke),
                web.post("/v1/faults", self.inject),
                web.get("/v1/plan/table", self.plan_table),
                web.post("/v1/plan/whatif", self.plan_whatif),
                web.get("/v1/logs/{task}", self.logs),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        # A page in somebody's browser can reach loopback; it cannot name us as its Host.
        host = request.host.rsplit(":", 1)[0].strip("[]")
        if self._access.is_open and not is_loopback(host):
            return _error(403, f"host: {host} is not loopback; call 127.0.0.1, or set api.tokens_file")
        # It could send us a form, though; browsers say where such a thing comes from.
        if request.method == "POST" and "Origin" in request.headers:
            return _error(403, "origin: web pages may not control a cluster; use unicronctl")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            who = self._access.grant(request.method, request.path, given, request.remote or "?", time.monotonic())
        except NoAccess as error:
            return _error(error.status, str(error))
        _who.set(who.name)
        asks_the_state = request.method == "POST" or request.path.startswith(_OF_THE_STATE)
        if asks_the_state and not self._coordinator.live.is_set():
            return _error(503, "coordinator: still reading its log; try again in a moment")
        if request.method == "POST" and (trouble := self._trouble()):
            return _error(503, f"log: {trouble}; try again later")
        if request.method == "POST" and self._coordinator.fault:
            return _error(503, f"coordinator: has stopped deciding: {self._coordinator.fault}")
        try:
            return await handler(request)
        except Refused as refusal:
            return _error(refusal.status, str(refusal))

    async def health(self, _: web.Request) -> web.Response:
        """Whether the coordinator decides ("live"), still folds its log, cannot because the log takes nothing, or has
        stopped because a decision of its own was not sound.

        Always 200: a coordinator that waits for its log is not helped by being killed.
        """
        coordinator, trouble = self._coordinator, self._trouble()
        status = "log takes nothing" if trouble else "live" if coordinator.live.is_set() else "catching up"
        if coordinator.fault:
            status, trouble = "stopped deciding", coordinator.fault
        seq = coordinator.state.seq
        alarms = coordinator.standing_alarms() + self._access.alarms()
        told = {"status": status, "trouble": trouble, "alarms": alarms, "term": coordinator.state.term, "seq": seq}
        told["kept_back"] = self._kept_back()
        return _json(told)

    def _kept_back(self) -> dict[str, dict[str, float]]:
        kept = self._coordinator.kept_back()
        return {node: {"entries": one.entries, "oldest_s": one.oldest_us / 1e6} for node, one in kept.items()}

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus text format."""
        return web.Response(body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def state(self, _: web.Request) -> web.Response:
        """The whole folded state, its digest, and what follows from it."""
        state, now_us = self._coordinator.state, time.time_ns() // 1000
        derived = {
            "waf": {task.name: achieved_waf(task, state.now_us) for task in state.tasks.values()},
            "delivered_flop": {task.name: delivered_flop(task) for task in state.tasks.values()},
        }
        # As floats: JSON's integers end long before a large cluster's work does.
        costs = {name: float(flop) for name, flop in costs_at(state, now_us)._asdict().items()}
        mtbf_s = worker_mtbf_us(state, self._config.policy) / 1e6
        body = {"digest": digest(state), "state": discreet_state(to_json(state)), "derived": derived}
        return _json({**body, "costs": costs, "worker_mtbf_s": mtbf_s, "kept_back": self._kept_back()})

    async def plan_table(self, _: web.Request) -> web.Response:
        """The one-step table as it stands: a row per event that may come next. 503 while there is none."""
        foresight, epoch = self._coordinator.foresight, self._coordinator.state.plan.epoch
        table = foresight.table
        if table is None or foresight.epoch != epoch:
            return _error(503, f"table: plan {epoch} has no table yet; try again in a moment")
        return _json({"epoch": epoch, "rows": await asyncio.to_thread(foreseen, table)})

    async def plan_whatif(self, request: web.Request) -> web.Response:
        """The plan that would be adopted, were the cluster as the body says (`what_if.Changes`); nothing changes."""
        changes = await _body(request, Changes)
        state, policy = self._coordinator.state, self._config.policy
        try:
            plan = await asyncio.to_thread(what_if, state, policy, changes)
        except (BadChange, ProblemError) as error:
            return _error(400, str(error))
        return _json({"now": state.plan, "then": plan})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events from the log itself: history after `after`, then live where `follow` is set."""
        after = _number(request, "after") or 0
        follow = request.query.get("follow", "0") not in ("", "0", "false")
        until = None if follow else await self._event_log.last_seq()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        if until is not None and until <= after:
            return response
        async with aclosing(self._event_log.read(after, until_seq=until)) as entries:
            async for entry in entries:
                kind = "Quarantined" if isinstance(entry, Quarantined) else type(entry.envelope.event).__name__
                data = msgspec.json.encode(discreet_entry(entry_json(entry))).decode()
                await response.write(f"id: {entry.seq}\nevent: {kind}\ndata: {data}\n\n".encode())
        return response

    async def submit(self, request: web.Request) -> web.Response:
        """Take a task on. 400 says which field is wrong; 409 that the name is in use."""
        spec, wrong = understood(await _json_of(request))
        if spec is None:
            return _error(400, str(wrong[0]))
        known = self._coordinator.state.tasks.get(spec.name)
        if known is not None and (known.status is TaskStatus.ACTIVE or not known.at_rest):
            return _error(409, f"name: task {spec.name} already exists; choose another name, or cancel it first")
        if not spec.checkpoint.dir:
            directory = str(self._config.checkpoints / spec.name)
            spec = replace(spec, checkpoint=replace(spec.checkpoint, dir=directory))
        warnings = contradictions(self._config.policy, self._config.heartbeat_s, spec.env) + warnings_of(spec.env)
        return await self._append(TaskSubmitted(spec=spec), {"task": spec.name, "warnings": warnings}, 201)

    async def cancel(self, request: web.Request) -> web.Response:
        """End a task; its workers stop, its checkpoints stay."""
        name = self._task(request).name
        reason = (await _body(request, _Reason)).reason or _ASKED
        return await self._append(TaskCancelled(task=name, reason=reason), {"task": name}, 202)

    async def reshape(self, request: web.Request) -> web.Response:
        """Another tp, pp, or number of workers for a running task. 400 says which field is wrong."""
        task = self._task(request)
        event = asked_for(self._coordinator.state, task, await _body(request, ReshapeOrder))
        about = {name: getattr(event, name) for name in event.__struct_fields__ if name != "by"}
        return await self._append(event, about, 202)

    async def cordon(self, request: web.Request) -> web.Response:
        """No new workers for a node; with drain, those that it has move away at an iteration boundary."""
        node = self._node(request)
        asked = await _body(request, _Cordon)
        event = NodeCordoned(node=node, drain=asked.drain, reason=asked.reason or _ASKED)
        return await self._append(event, {"node": node}, 202)

    async def uncordon(self, request: web.Request) -> web.Response:
        """The node may have workers again."""
        node = self._node(request)
        reason = (await _body(request, _Reason)).reason or _ASKED
        return await self._append(NodeUncordoned(node=node, reason=reason), {"node": node}, 202)

    async def enroll(self, request: web.Request) -> web.Response:
        """The node's agent may log in with this key; it need not have joined before."""
        node = request.match_info["node"]
        asked = await _body(request, _Enrolment)
        if not self._config.nats.has_keys:
            return _error(400, "nats.auth: this coordinator uses no keys; set it to keys (docs/operate/logins.md)")
        expires_us = time.time_ns() // 1000 + int(asked.unused_h * 3600e6) if asked.unused_h else 0
        try:
            agent_login(node)
        except BadLogin as error:
            return _error(400, f"node: {error}")
        event = NodeEnrolled(node=node, key=asked.key, expires_us=expires_us)
        if why := enrolment_problem(self._coordinator.state, event):
            return _error(400, why)
        return await self._append(event, {"node": node}, 202)

    async def revoke(self, request: web.Request) -> web.Response:
        """The node's agent may log in no more."""
        node = request.match_info["node"]
        reason = (await _body(request, _Reason)).reason or _ASKED
        if node not in self._coordinator.state.logins:
            return _error(404, f"node: {node[:63]} is not enrolled")
        return await self._append(NodeRevoked(node=node, reason=reason), {"node": node}, 202)

    async def ask(self, event: AnyRequest) -> None:
        """Append what a part of this process asks for, as people do."""
        await self._append(event, {}, 202)

    async def inject(self, asked: web.Request) -> web.Response:
        """Order a fault; the answer names whom it was for."""
        order = await _body(asked, FaultOrder)
        event = ordered(order, self._coordinator.state, allowed=self._config.injection)
        return await self._append(event, {"node": event.node, "worker": event.fault.worker}, 202)

    def _task(self, asked: web.Request) -> Task:
        name = asked.match_info["task"]
        task = self._coordinator.state.tasks.get(name)
        if task is None or task.status is not TaskStatus.ACTIVE:
            raise Refused(404, f"task: {name} is not active; see `unicronctl tasks`")
        return task

    def _node(self, asked: web.Request) -> str:
        name = asked.match_info["node"]
        if name not in self._coordinator.state.nodes:
            raise Refused(404, f"node: no node {name}; see `unicronctl nodes`")
        return name

    async def logs(self, request: web.Request) -> web.Response:
        """A piece of a worker's log, from the node that has it."""
        name = request.match_info["task"]
        rank, tail_bytes, offset = (_number(request, field) for field in ("rank", "tail_bytes", "offset"))
        try:
            piece = await self._logs.read(self._coordinator.state, name, rank, tail_bytes, offset)
        except LookupError as error:
            return _error(404, str(error.args[0]))
        except LogsUnavailable as error:
            return _error(503, str(error))
        return _json(piece)

    async def _append(self, event: AnyRequest, about: dict[str, object], status: int) -> web.Response:
        schema = self._coordinator.state.schema
        if schema >= NAMES_WHO_ASKS:
            event = replace(event, by=_who.get())
        if beyond := beyond_schema(event, schema):
            return _error(400, f"{beyond[0]}: this coordinator writes schema {schema}, which lacks it (write_schema)")
        self._number += 1
        envelope = Envelope(
            producer=API_PRODUCER,
            boot=self._coordinator.state.term,  # grows with every coordinator, whatever the clock does
            number=self._number,
            observed_at_us=time.time_ns() // 1000,
            event=event,
        )
        try:
            seq = await self._coordinator.submit(envelope)
        except BadEvent as error:
            return _error(400, error.reason)
        return _json({**about, "seq": seq}, status)


class _Enrolment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`unused_h`: after so many hours without a join the login ends; 0: never."""

    key: PublicKey
    unused_h: Annotated[float, Meta(ge=0.0, le=8784.0)] = 24.0


class _Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: Text = ""


class _Cordon(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    drain: bool = False
    reason: Text = ""


async def _body(asked: web.Request, kind: type[T]) -> T:
    """The request's JSON as a `kind`; no body is an empty object. Raises Refused with what is wrong first."""
    value = await _json_of(asked)
    for fault in faults(value, kind):
        raise Refused(400, str(fault))
    return msgspec.convert(value, kind, strict=True)


async def _json_of(asked: web.Request) -> Any:
    try:
        value = msgspec.json.decode(await asked.read() or b"{}")
    except msgspec.DecodeError as error:
        raise Refused(400, f"body: not valid JSON: {error}") from None
    except RecursionError:
        raise Refused(400, "body: not valid JSON: brackets are nested too deep") from None
    if _depth(value) > _DEPTH_MAX:
        raise Refused(400, f"body: brackets are nested more than {_DEPTH_MAX} deep")
    return value


def _depth(value: Any) -> int:
    """How deep lists and objects are nested, without recursion: what is deep here would overflow elsewhere."""
    depth, level = 0, [value]
    while level := [inner for outer in level if isinstance(outer, dict | list) for inner in _inner(outer)]:
        depth += 1
    return depth


def _inner(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def _number(asked: web.Request, field: str) -> int | None:
    """A number of the query, None where it is not given. Raises Refused."""
    text = asked.query.get(field)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        shown = ascii(text[:40])  # as it is written may be what JSON cannot carry
        raise Refused(400, f"{field}: {shown} is not a number; give an integer from 0 to {'9' * _DIGITS_MAX}")
    return int(text)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(status: int, text: str) -> web.Response:
    # Bytes of a header that are no text arrive as what JSON cannot carry.
    return _json({"error": text.encode(errors="backslashreplace").decode()}, status)
