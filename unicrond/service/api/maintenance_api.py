"""The routes about maintenance windows (core/nodes/drains.py).

POST /v1/maintenance                   {"nodes", "begins": {"at_us"} or {"in_s"}, "for_s", "reason"}; a window's id
POST /v1/maintenance/ID/cancel         {"reason"}
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from aiohttp import web

from unicrond.core.rules.requests import maintenance_problem
from unicrond.events import vocabulary as v
from unicrond.service.api.http_parts import body_of, error
from unicrond.service.api.request_bodies import MaintenanceOrder, Reason
from unicrond.service.coordinator.coordinator import Coordinator

_REASON = "requested by an operator"
Append: TypeAlias = Callable[
    [v.MaintenancePlanned | v.MaintenanceCancelled, dict[str, object], int], Awaitable[web.Response]
]


class MaintenanceApi:
    """The routes, over one coordinator. `append`: puts a request of the caller into the log, and answers."""

    def __init__(self, coordinator: Coordinator, append: Append) -> None:
        self._coordinator = coordinator
        self._append = append

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/v1/maintenance", self.plan),
            web.post("/v1/maintenance/{window}/cancel", self.cancel),
        ]

    async def plan(self, request: web.Request) -> web.Response:
        """Plan a maintenance window: the nodes are empty while it lasts."""
        order = await body_of(request, MaintenanceOrder)
        from_us = order.begins.time_us()
        until_us = from_us + int(order.for_s * 1e6)
        event = v.MaintenancePlanned(
            nodes=tuple(dict.fromkeys(order.nodes)), from_us=from_us, until_us=until_us, reason=order.reason or _REASON
        )
        for node in event.nodes:
            if node not in self._coordinator.state.nodes:
                return error(404, f"node {node} is not known; see `unicronctl nodes`")
        if problem := maintenance_problem(self._coordinator.state, event):
            return error(400, problem)
        return await self._append(event, {"nodes": event.nodes, "from_us": from_us, "until_us": until_us}, 201)

    async def cancel(self, request: web.Request) -> web.Response:
        """End a maintenance window now, or before it begins."""
        window = request.match_info["window"]
        if window not in self._coordinator.state.windows:
            return error(404, f"maintenance {window} is not planned; see `unicronctl maintain`")
        reason = (await body_of(request, Reason)).reason or _REASON
        return await self._append(v.MaintenanceCancelled(window=window, reason=reason), {"window": window}, 202)
