"""The HTTP API (aiohttp): read the state, follow the events, submit and cancel tasks.

    GET  /, /page/FILE                     the web page (unicrond/page); no token needed
    GET  /livez, /readyz, /healthz         probes: the process can be kept; it is caught up and the log takes appends;
                                           what stands behind it, always 200. No token needed
    GET  /v1/view, /v1/ranks/TASK          what the page shows, and what the token may
    GET  /v1/events?after=SEQ[&until=SEQ][&follow=1]   server-sent events
    GET  /v1/story?since_us=T|last_s=S     what happened in the cluster since then (views/accounts.py)
    GET  /v1/story/KIND/NAME               what became of a node, a task, an incident or a plan
    GET  /v1/skips                         the entries that every reader passes over: {SEQ: why}
    POST /v1/tasks                         a task file's content as JSON
    POST /v1/tasks/NAME/cancel             {"reason"}
    POST /v1/tasks/NAME/update             another weight, priority, or other bounds: see request_bodies.py
    POST /v1/tasks/NAME/prove              one worker is killed, and what follows watched (core/rules/healing_proofs.py)
    POST /v1/tasks/NAME/reshape            another layout or size: see core/rules/reshape_requests.py
    POST /v1/mode, /v1/tasks/NAME/mode     {"mode", "reason"}
    POST /v1/nodes/NAME/cordon             {"drain", "reason", "until_return", "by": {"at_us"} or {"in_s"}}
    POST /v1/nodes/NAME/uncordon           {"reason"}
    POST /v1/nodes/NAME/forget             {"leave", "reason"}
    POST /v1/maintenance                   windows, and /v1/maintenance/ID/cancel: see maintenance_api.py
    POST /v1/nodes/NAME/enroll, /revoke, /v1/pod-logins   logins of nodes: see login_api.py
    POST /v1/faults                        see fault_targets.py; 409 unless the configuration allows it
    GET  /v1/goodput?peak_tflops=N&last_s=S   goodput and badput by cause (views/goodput_report.py); N: of one worker
    GET  /v1/plan/table                    what would be planned after each event that may come next
    GET  /v1/views/NAME                    what a view of the log has to say, such as goodput (views/table.py)
    GET  /v1/plan/spares?repair_s=S&mtbf_s=S   how many nodes of each type to keep back (views/spares.py)
    POST /v1/plan/whatif                   what would be planned if; changes nothing
    GET  /v1/alarms                        the alarms; acknowledge, silence, assign: see alarm_api.py
    GET  /v1/logs/TASK?rank=R|worker=W&tail_bytes=N&offset=O
    GET  /v1/stacks/TASK?rank=R            what a worker's threads are doing
    GET  /v1/marks/TASK                    where each worker is: phase, micro-batch, collective, since when
    POST /v1/checks                        {"library"}: what agents see of nodes, links and storage; up to a minute
    GET  /v1/state, /metrics               the folded state; Prometheus

What people ask for becomes an observation in the log; nothing is changed from here in any other way. Who may ask what:
`access.py`.
JSON knows no NaN, which a loss may be: null stands in its place. Tokens and passwords are hidden (redaction.py);
the digest is that of the state with them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec.structs import replace

from unicrond.core.nodes import node_removal as forgetting
from unicrond.core.rules.fault_targets import FaultOrder, OrderRefused, injection_request
from unicrond.core.rules.requests import agent_mismatch, update_problem
from unicrond.core.rules.reshape_requests import ReshapeOrder, reshape_request
from unicrond.core.rules.survey import worker_mtbf_us
from unicrond.core.state.state import Task, TaskStatus
from unicrond.core.state.state_bytes import digest, to_json
from unicrond.core.tasks.reshaping import reshaped
from unicrond.core.tasks.resubmission import resubmission
from unicrond.core.tasks.task_rules import too_few_lanes
from unicrond.core.tasks.task_validation import name_conflict, storage_problems, task_problems
from unicrond.display.cluster_tables import derived_values
from unicrond.events import vocabulary as v
from unicrond.events.log.event_log import EventLog
from unicrond.events.vocabulary import TaskSpec, TaskStart
from unicrond.events.wire.codec import API_PRODUCER, BadEvent
from unicrond.events.wire.envelope import Envelope
from unicrond.events.wire.schemas import beyond_schema
from unicrond.intake.config import Config, is_loopback
from unicrond.intake.task_file import parse_task
from unicrond.intake.timeouts import contradictions
from unicrond.intake.tokens import FULL_GRANT, Grant
from unicrond.service.api.access import (
    Access,
    AccessDenied,
    require_free_name,
    require_owner,
    require_scope_of_priority,
    user_of,
)
from unicrond.service.api.alarm_api import AlarmApi, without_people
from unicrond.service.api.event_log_api import LogApi
from unicrond.service.api.forwarding import Forwarder, client_of
from unicrond.service.api.http_parts import answer, body_of, error, is_from_elsewhere, json_of
from unicrond.service.api.login_api import LoginApi
from unicrond.service.api.maintenance_api import MaintenanceApi
from unicrond.service.api.metrics import exposition
from unicrond.service.api.own_state import own_state
from unicrond.service.api.page_api import PageApi
from unicrond.service.api.plan_api import ModeApi, PlanApi
from unicrond.service.api.process_status import ProcessStatus
from unicrond.service.api.redaction import mask_of, redact_state, warnings_of
from unicrond.service.api.request_bodies import (
    CordonOrder,
    ForgetOrder,
    OfNode,
    Reason,
    UpdateOrder,
)
from unicrond.service.api.worker_output import LogReader
from unicrond.service.coordinator.coordinator import Coordinator

_REASON = "requested by an operator"
#: The paths that need the whole state: they are refused until the log is folded.
_STATE_PATHS = (
    "/v1/state",
    "/v1/plan/",
    "/v1/logs/",
    "/v1/stacks/",
    "/v1/marks/",
    "/v1/goodput",
    "/v1/view",
    "/v1/ranks/",
    "/v1/story",
)
#: The grant of the request that is being handled.
_caller: ContextVar[Grant] = ContextVar("who", default=FULL_GRANT)
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
        process: ProcessStatus | None = None,
    ) -> None:
        """Take the parts that the routes need. `access`: who may ask; None: everybody. `process`: the state of the
        process around the coordinator."""
        self._config = config
        self._coordinator = coordinator
        self._log_api = LogApi(event_log, logs, lambda: coordinator.state, _caller.get)
        self._access = access or Access()
        self._process = process = process or ProcessStatus()
        self._forwarder = Forwarder(config.api.heads, config.api_address, client_of(config))
        self._number = 0
        self._alarms = AlarmApi(coordinator, self._append)
        coordinator.add_alarms(self._access.alarms)
        self._looking = PageApi(config, coordinator, self.condition, _caller.get)
        self._metrics = exposition(
            lambda: coordinator.state,
            coordinator.alarms,
            lambda: coordinator.fault,
            process.trouble,
            coordinator.outbox_backlog,
            lambda: (*coordinator.around.metrics(), *self._alarms.metrics()),
            lambda: process.leads,
            coordinator.views,
        )

    def application(self, *outer: Middleware) -> web.Application:
        """Return the aiohttp application with all routes. `outer`: middlewares that go before its own."""
        app = web.Application(middlewares=[*outer, self._guard], client_max_size=256 * 1024)
        app.add_routes(
            [
                web.get("/livez", self.alive),
                web.get("/readyz", self.ready),
                web.get("/healthz", self.health),
                web.get("/metrics", self.metrics),
                web.get("/v1/state", self.state),
                web.post("/v1/tasks", self.submit),
                web.post("/v1/tasks/{task}/cancel", self.cancel),
                web.post("/v1/tasks/{task}/update", self.update),
                web.post("/v1/tasks/{task}/prove", self.prove),
                web.post("/v1/tasks/{task}/reshape", self.reshape),
                web.post("/v1/nodes/{node}/cordon", self.cordon),
                web.post("/v1/nodes/{node}/uncordon", self.uncordon),
                web.post("/v1/nodes/{node}/forget", self.forget),
                web.post("/v1/faults", self.inject),
                *self._log_api.routes(),
                *self._looking.routes(),
                *self._alarms.routes(),
                *PlanApi(self._config.policy, self._coordinator).routes(),
                *ModeApi(self._append, self._task).routes(),
                *MaintenanceApi(self._coordinator, self._append).routes(),
                *LoginApi(self._config, self._coordinator, self._append, self._access).routes(),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        # A page in somebody's browser can reach loopback; it cannot name us as its Host.
        host = request.host.rsplit(":", 1)[0].strip("[]")
        if self._access.is_open and not is_loopback(host):
            return error(403, f"host: {host} is not loopback; call 127.0.0.1, or set api.tokens_file")
        # It could send us a form, though, or stop a worker for its stacks. Our own page may.
        acts = request.method != "GET" or request.path.startswith("/v1/stacks/")
        if acts and is_from_elsewhere(request):
            return error(403, "origin: web pages of others may not control a cluster; use unicronctl")
        token, address = _token_of(request), request.remote or "?"
        try:
            grant = self._access.grant(request.method, request.path, token, address, time.monotonic())
        except AccessDenied as refusal:
            where = {"token_file": refusal.token_file} if refusal.token_file else {}
            return answer({"error": str(refusal), **where}, refusal.status)
        _caller.set(grant)
        needs_state = request.method == "POST" or request.path.startswith(_STATE_PATHS)
        if needs_state and not self._coordinator.live.is_set():
            if not self._coordinator.caught_up.is_set():
                return error(503, "coordinator: still reading its log; try again in a moment")
            if request.method == "POST":
                address = self._process.leader_address
                if self._forwarder.may_forward(request, address):
                    return await self._forwarder.forward(request, address)
                return answer({"error": self._process.referral, "standby": True}, 503)
        if request.method == "POST" and (trouble := self._process.trouble()):
            return error(503, f"log: {trouble}; try again later")
        if request.method == "POST" and self._coordinator.fault:
            return error(503, f"coordinator: has stopped deciding: {self._coordinator.fault}")
        try:
            return await handler(request)
        except OrderRefused as refusal:
            return error(refusal.status, str(refusal))

    def status(self) -> str:
        """Return whether the coordinator decides ("live"), stands by, still folds its log, cannot decide because the
        log takes no appends, or has stopped because a decision of its own was not sound."""
        coordinator = self._coordinator
        if coordinator.fault:
            return "stopped deciding"
        if self._process.trouble():
            return "log takes nothing"
        if coordinator.live.is_set():
            return "live"
        return "standby" if coordinator.caught_up.is_set() and not self._process.leads else "catching up"

    async def alive(self, _: web.Request) -> web.Response:
        """Answer 200 as long as this process runs: killing it would mend no trouble of its log or its state."""
        return answer({"status": self.status()})

    async def ready(self, _: web.Request) -> web.Response:
        """Answer 200 where this head has folded the log and the log takes appends, so that it decides or would at once;
        else 503 with the reason."""
        body = {"status": self.status(), "trouble": self._coordinator.fault or self._process.trouble()}
        return answer(body, 200 if body["status"] in ("live", "standby") else 503)

    async def health(self, request: web.Request) -> web.Response:
        """Answer with the `status` and its causes, always 200: killing a coordinator that waits for its log does not
        help. Who cares for an alarm is told to those alone who may read."""
        body = self.condition()
        if not self._access.may_read(_token_of(request), request.remote or "?", time.monotonic()):
            body["alarms"] = without_people(body["alarms"])
        return answer(body)

    def condition(self) -> dict[str, Any]:
        """Return the body of /healthz."""
        coordinator = self._coordinator
        trouble = coordinator.fault or self._process.trouble()
        state, alarms = coordinator.state, self._alarms.of_head()
        body = {"status": self.status(), "trouble": trouble, "alarms": alarms, "term": state.term, "seq": state.seq}
        body |= {"outbox_backlog": self._outbox_backlog(), "leads": self._process.leads, "heads": self._process.heads}
        body["archive"] = self._process.archive()
        return {**body, "weaker": self._process.weaker(), "mode": state.mode}

    def _outbox_backlog(self) -> dict[str, dict[str, float]]:
        backlogs = self._coordinator.outbox_backlog().items()
        return {node: {"entries": backlog.entries, "oldest_s": backlog.oldest_us / 1e6} for node, backlog in backlogs}

    async def metrics(self, _: web.Request) -> web.Response:
        """Answer with the metrics in Prometheus's text format."""
        return web.Response(body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def state(self, _: web.Request) -> web.Response:
        """Answer with the whole folded state, its digest, and what follows from it. To who sees an owner's tasks alone:
        with the owner, and what that sees of the state."""
        whole, now_us, caller = self._coordinator.state, time.time_ns() // 1000, _caller.get()
        state = own_state(whole, caller.owner) if caller.reads_own_alone else whole
        public_state = redact_state(to_json(state), mask_of(whole))
        body = {"digest": digest(whole), "state": public_state, **derived_values(state, now_us)}
        if caller.reads_own_alone:
            return answer({**body, "owner": caller.owner})
        mtbf_s = worker_mtbf_us(state, self._config.policy) / 1e6
        return answer({**body, "worker_mtbf_s": mtbf_s, "outbox_backlog": self._outbox_backlog()})

    async def submit(self, request: web.Request) -> web.Response:
        """Accept a new task. 400 says which field is wrong; 409 that the name is in use; 403 that it was another's, or
        that the task may not run as this user."""
        spec, wrong = await asyncio.to_thread(parse_task, await json_of(request))  # a throughput_model takes a while
        if spec is None:
            return error(400, str(wrong[0]))
        caller = _caller.get()
        require_free_name(caller, self._coordinator.state, spec.name)
        if conflict := name_conflict(self._coordinator.state, spec.name):
            return error(409, conflict)
        spec = self._with_start(replace(spec, run_as=user_of(caller, spec.run_as)))
        state = self._coordinator.state
        if problems := [*task_problems(spec, state), *storage_problems(spec, state)]:
            return error(400, str(problems[0]))
        if spec.priority > 0:
            require_scope_of_priority(caller, spec.priority)
        assert spec.start is not None
        outcome = resubmission(self._coordinator.state, spec, spec.start)
        if outcome.problem:
            return error(409, outcome.problem)
        spec = replace(spec, start=replace(spec.start, continues=outcome.continues))
        warnings = contradictions(self._config.policy, self._config.heartbeat_s, spec.env) + warnings_of(spec.env)
        warnings += too_few_lanes(spec)
        event = v.TaskSubmitted(spec=spec, owner=caller.owner)
        return await self._append(event, {"task": spec.name, "warnings": warnings, "outlook": outcome.outlook}, 201)

    def _with_start(self, spec: TaskSpec) -> TaskSpec:
        """Return the task with a directory for its checkpoints, and its start with a name for this run. Raise
        OrderRefused where it is to begin from another owner's states."""
        start, directory = spec.start or TaskStart(), spec.checkpoint.dir or self._config.checkpoints_of(spec.name)
        if start.mode == "fork":
            require_free_name(_caller.get(), self._coordinator.state, start.source, "start.source")
            source = self._coordinator.state.tasks.get(start.source)
            source_dir = source.spec.checkpoint.dir if source else start.source_dir
            start = replace(start, source_dir=source_dir or self._config.checkpoints_of(start.source))
        start = replace(start, run_id=secrets.token_hex(4), is_changed=False)
        return replace(spec, start=start, checkpoint=replace(spec.checkpoint, dir=directory))

    async def cancel(self, request: web.Request) -> web.Response:
        """End a task: its workers stop, its checkpoints stay."""
        name = self._task(request).name
        reason = (await body_of(request, Reason)).reason or _REASON
        return await self._append(v.TaskCancelled(task=name, reason=reason), {"task": name}, 202)

    async def update(self, request: web.Request) -> web.Response:
        """Give a running task another weight, priority or other bounds. 400 says which setting is wrong."""
        task = self._task(request)
        order = await body_of(request, UpdateOrder)
        event = v.TaskUpdated(task=task.name, **{**msgspec.structs.asdict(order), "reason": order.reason or _REASON})
        if problem := update_problem(task, event):
            return error(400, problem)
        if (event.priority or 0) > max(0, task.spec.priority):
            require_scope_of_priority(_caller.get(), event.priority or 0)
        return await self._append(event, {"task": task.name, **event.settings}, 202)

    async def prove(self, request: web.Request) -> web.Response:
        """Have a running task prove that it heals: one of its workers is killed as soon as the task can bear it."""
        task = self._task(request)
        return await self._append(v.ProofRequested(task=task.name), {"task": task.name}, 202)

    async def reshape(self, request: web.Request) -> web.Response:
        """Submit another layout, or number of workers, for a running task. 400 says which field is wrong."""
        task = self._task(request)
        event = reshape_request(self._coordinator.state, task, await body_of(request, ReshapeOrder))
        about = {name: getattr(event, name) for name in event.__struct_fields__ if name != "requester"}
        return await self._append(event, {**about, "warnings": too_few_lanes(reshaped(task.spec, event))}, 202)

    async def cordon(self, request: web.Request) -> web.Response:
        """Keep new workers off a node; with drain, also move its workers away at an iteration boundary, `by` a time."""
        node = self._node(request)
        order = await body_of(request, CordonOrder)
        if order.by is not None and not order.drain:
            return error(400, "by: only a drain has a time; set drain")
        by_us = order.by.time_us() if order.by is not None else 0
        event = v.NodeCordoned(
            node=node,
            drain=order.drain,
            until_return=order.until_return,
            reason=order.reason or _REASON,
            agent_boot=order.boot,
            address=order.address,
            empty_by_us=by_us,
        )
        return await self._of_node(event, {"empty_by_us": by_us} if by_us else {})

    async def uncordon(self, request: web.Request) -> web.Response:
        """Allow workers on a node again."""
        node = self._node(request)
        order = await body_of(request, OfNode)
        event = v.NodeUncordoned(
            node=node, reason=order.reason or _REASON, agent_boot=order.boot, address=order.address
        )
        return await self._of_node(event)

    async def forget(self, request: web.Request) -> web.Response:
        """Remove a lost node from the state; with leave, stop the agent of a node that is up first."""
        node = self._node(request)
        order = await body_of(request, ForgetOrder)
        state = self._coordinator.state
        if problem := forgetting.refusal(state.nodes[node], leave=order.leave):
            return error(409, problem)
        event = v.ForgetRequested(
            node=node, leave=order.leave, reason=order.reason or _REASON, agent_boot=order.boot, address=order.address
        )
        return await self._of_node(event)

    async def _of_node(
        self, event: v.NodeCordoned | v.NodeUncordoned | v.ForgetRequested, about: Mapping[str, Any] | None = None
    ) -> web.Response:
        if problem := agent_mismatch(self._coordinator.state, event):
            return error(409, problem)
        return await self._append(event, {"node": event.node, **(about or {})}, 202)

    async def ask(self, event: v.AnyRequest) -> None:
        """Append a request from a part of this process, as if a person had sent it."""
        await self._append(event, {}, 202)

    async def inject(self, request: web.Request) -> web.Response:
        """Order a fault; answer with the node and the worker that it was for."""
        order = await body_of(request, FaultOrder)
        event = injection_request(order, self._coordinator.state, allowed=self._config.injection)
        return await self._append(event, {"node": event.node, "worker": event.fault.worker}, 202)

    def _task(self, request: web.Request) -> Task:
        name = request.match_info["task"]
        task = self._coordinator.state.tasks.get(name)
        if task is None or task.status is not TaskStatus.ACTIVE:
            raise OrderRefused(404, f"task: {name} is not active; see `unicronctl tasks`")
        require_owner(_caller.get(), task)
        return task

    def _node(self, request: web.Request) -> str:
        name = request.match_info["node"]
        if name not in self._coordinator.state.nodes:
            raise OrderRefused(404, f"node: no node {name}; see `unicronctl nodes`")
        return name

    async def _append(self, event: v.AnyRequest, about: dict[str, object], status: int) -> web.Response:
        schema = self._coordinator.state.schema
        event = replace(event, requester=_caller.get().name)
        if beyond := beyond_schema(event, schema):
            return error(400, f"{beyond[0]}: this coordinator writes schema {schema}, which lacks it (write_schema)")
        term = self._coordinator.term
        if not term:
            raise OrderRefused(503, self._process.referral)
        self._number += 1
        envelope = Envelope(
            producer=API_PRODUCER,
            boot=term,  # grows with every coordinator, whatever the clock does
            number=self._number,
            observed_at_us=time.time_ns() // 1000,
            event=event,
        )
        try:
            seq = await self._coordinator.submit(envelope)
        except BadEvent as wrong:
            return error(400, wrong.reason)
        return answer({**about, "seq": seq}, status)


def _token_of(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")
