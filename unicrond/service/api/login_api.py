"""The HTTP API's part for logins of nodes: enroll and revoke, by people and by pods of Kubernetes.

    POST /v1/nodes/NAME/enroll             {"key", "unused_h", "previous_h"}
    POST /v1/nodes/NAME/revoke             {"reason"}
    GET  /v1/authorities                   by node, the CAs that its agent tells in its heartbeats
    POST /v1/pod-logins                    {"key"}, with the pod's token: enroll the node that this pod is

Only the public part of a key comes here. A pod cannot name another pod's node: the API server says which pod a token is
of (service/trust/pod_tokens.py), and the pod determines the node. A pod gets a new key once in POD_LOGIN_EVERY_S, since
each one is an entry of the log and a reload of the NATS server; the key that its node has, it may request again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

from aiohttp import web

from unicrond.core.rules.fault_targets import OrderRefused
from unicrond.core.rules.requests import enrolment_problem
from unicrond.core.state.state import NodeStatus
from unicrond.events import vocabulary as v
from unicrond.events.host.kubernetes_account import POD_LOGINS
from unicrond.events.trust.logins import BadLogin, agent_login
from unicrond.intake.config import Config
from unicrond.service.api.access import Access
from unicrond.service.api.http_parts import answer, body_of, error
from unicrond.service.api.request_bodies import Enrolment, PodEnrolment, Reason
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.trust.node_certificates import NoAuthority, pem_for_node
from unicrond.service.trust.pod_tokens import PodRefused, PodTokens

POD_LOGIN_EVERY_S = 10.0
_HOUR_US = timedelta(hours=1) // timedelta(microseconds=1)
_Append = Callable[[v.AnyRequest, dict[str, object], int], Awaitable[web.Response]]


class LoginApi:
    """The routes for logins of nodes, over one coordinator. `append`: a request to the log."""

    def __init__(self, config: Config, coordinator: Coordinator, append: _Append, access: Access) -> None:
        self._config = config
        self._coordinator = coordinator
        self._append = append
        self._access = access
        self._pods = PodTokens(config.pod_logins)
        #: Per node, when its pod last got a key, by the monotonic clock; those of the last POD_LOGIN_EVERY_S.
        self._recent_s: dict[str, float] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/v1/nodes/{node}/enroll", self.enroll),
            web.post("/v1/nodes/{node}/revoke", self.revoke),
            web.get("/v1/authorities", self.authorities),
            web.post(POD_LOGINS, self.enroll_pod),
        ]

    async def enroll(self, request: web.Request) -> web.Response:
        """Allow a node's agent to log in with this key; the node need not have joined before."""
        enrolment = await body_of(request, Enrolment)
        previous_until_us = time.time_ns() // 1000 + int(enrolment.previous_h * _HOUR_US) if enrolment.previous_h else 0
        return await self._enroll(request.match_info["node"], enrolment.key, enrolment.unused_h, previous_until_us)

    async def authorities(self, _: web.Request) -> web.Response:
        """Answer with Heartbeat.authorities of each node that may log in or is up; null where none was heard."""
        state, beats = self._coordinator.state, self._coordinator.liveness.beats
        names = {*state.logins, *(name for name, node in state.nodes.items() if node.status is NodeStatus.UP)}
        last_beats = {name: beats[name].beat if name in beats else None for name in sorted(names)}
        return answer({"nodes": {name: beat and beat.authorities for name, beat in last_beats.items()}})

    async def enroll_pod(self, request: web.Request) -> web.Response:
        """Allow the agent of the pod whose token comes with the request to log in with this key; answer with the node
        that it is and what its key carries: a certificate of its own, and the CA."""
        settings = self._config.pod_logins
        if not settings.service_account:
            return error(404, "pod_logins: this coordinator gives pods no logins; set pod_logins.service_account")
        address, now_s = request.remote or "?", time.monotonic()
        self._access.require_patience(address, now_s)
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            pod = await self._pods.pod_of(token)
        except PodRefused as refusal:
            if refusal.status in (401, 403):
                self._access.count_failure(address, f"POST {request.path}: {refusal}", now_s)
            return error(refusal.status, str(refusal))
        key, node = (await body_of(request, PodEnrolment)).key, pod.node(settings.node)
        login = self._coordinator.state.logins.get(node)
        is_known = login is not None and login.key == key
        if not is_known and any(alarm.key == f"node-floods:{node}" for alarm in self._coordinator.standing_alarms()):
            return error(403, f"node: {node} floods the log; a person lets it in again: unicrond enroll {node}")
        self._recent_s = {name: at_s for name, at_s in self._recent_s.items() if now_s < at_s + POD_LOGIN_EVERY_S}
        if node in self._recent_s and not is_known:
            return error(429, f"node: {node} got a key a moment ago; try again in {POD_LOGIN_EVERY_S:g} s")
        try:
            pem = await asyncio.to_thread(pem_for_node, self._config, node)
        except (NoAuthority, OSError) as problem:
            return error(503, f"tls: cannot sign a certificate for {node}: {problem}")
        if is_known:
            return answer({"node": node, "pem": pem})
        self._recent_s[node] = now_s
        return await self._enroll(node, key, settings.unused_h, about={"pem": pem})

    async def _enroll(
        self,
        node: str,
        key: str,
        unused_h: float,
        previous_until_us: int = 0,
        about: dict[str, object] | None = None,
    ) -> web.Response:
        if not self._config.has_keys:
            return error(400, "nats.auth: this coordinator uses no keys; set it to keys (docs/operate/logins.md)")
        expires_us = time.time_ns() // 1000 + int(unused_h * _HOUR_US) if unused_h else 0
        try:
            agent_login(node)
        except BadLogin as wrong:
            return error(400, f"node: {wrong}")
        event = v.NodeEnrolled(node=node, key=key, expires_us=expires_us, previous_until_us=previous_until_us)
        if problem := enrolment_problem(self._coordinator.state, event):
            return error(400, problem)
        return await self._append(event, {"node": node, **(about or {})}, 202)

    async def revoke(self, request: web.Request) -> web.Response:
        """End the login of a node's agent."""
        node = request.match_info["node"]
        reason = (await body_of(request, Reason)).reason or "requested by an operator"
        if node not in self._coordinator.state.logins:
            raise OrderRefused(404, f"node: {node[:63]} is not enrolled")
        return await self._append(v.NodeRevoked(node=node, reason=reason), {"node": node}, 202)
