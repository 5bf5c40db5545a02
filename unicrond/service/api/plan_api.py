"""The routes about plans: what would be planned after each event that may come next, if the cluster were other, and
with nodes kept back; these change nothing. And about the mode (core/nodes/brakes.py): whether plans are carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from unicrond.core.planning.problem import ProblemError
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import Task
from unicrond.events.vocabulary import ModeRequested
from unicrond.service.api.http_parts import answer, body_of, error, json_of, number_in
from unicrond.service.api.request_bodies import ModeOrder
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.views import what_if
from unicrond.views.plan_preview import table_json
from unicrond.views.spares import DAY_S, spares

_REASON = "requested by an operator"


class PlanApi:
    """The routes about plans, over one coordinator."""

    def __init__(self, policy: Policy, coordinator: Coordinator) -> None:
        self._policy = policy
        self._coordinator = coordinator

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/v1/plan/table", self.table),
            web.get("/v1/plan/spares", self.spares),
            web.post("/v1/plan/whatif", self.whatif),
        ]

    async def table(self, _: web.Request) -> web.Response:
        """Answer with the one-step table: a row for each event that may come next. 503 while there is none."""
        foresight, epoch = self._coordinator.foresight, self._coordinator.state.plan.epoch
        table = foresight.table
        if table is None or foresight.epoch != epoch:
            return error(503, f"table: plan {epoch} has no table yet; try again in a moment")
        return answer({"epoch": epoch, **await asyncio.to_thread(table_json, table)})

    async def whatif(self, request: web.Request) -> web.Response:
        """Answer with the plan that would be adopted if the cluster were as the body says (`ClusterChanges`)."""
        body, state = await json_of(request), self._coordinator.state
        try:
            outcome = await asyncio.to_thread(what_if.what_if, state, self._policy, what_if.changes_of(body))
        except (what_if.WhatIfError, ProblemError) as wrong:
            return error(400, str(wrong))
        return answer(what_if.answer(state, outcome))

    async def spares(self, request: web.Request) -> web.Response:
        """Answer with what the cluster would achieve with some nodes kept back. A failed node is away for `repair_s` (a
        day); a worker fails once in `mtbf_s` (default: as measured)."""
        repair_s, mtbf_s = number_in(request, "repair_s"), number_in(request, "mtbf_s")
        state = self._coordinator.state
        try:
            report = await asyncio.to_thread(spares, state, self._policy, repair_s or DAY_S, mtbf_s or 0)
        except ValueError as wrong:
            return error(400, str(wrong))
        return answer(report)


class ModeApi:
    """The routes. `submit`: appends a request and answers. `task_of`: the active task that a request names, for who may
    change it."""

    def __init__(
        self,
        submit: Callable[[ModeRequested, dict[str, object], int], Awaitable[web.Response]],
        task_of: Callable[[web.Request], Task],
    ) -> None:
        self._submit = submit
        self._task_of = task_of

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.post("/v1/mode", self.of_cluster), web.post("/v1/tasks/{task}/mode", self.of_task)]

    async def of_cluster(self, request: web.Request) -> web.Response:
        """Set the mode of the whole cluster."""
        return await self._set(await body_of(request, ModeOrder))

    async def of_task(self, request: web.Request) -> web.Response:
        """Set the mode of an active task."""
        task = self._task_of(request).name
        return await self._set(await body_of(request, ModeOrder), task)

    async def _set(self, order: ModeOrder, task: str = "") -> web.Response:
        event = ModeRequested(mode=order.mode, task=task, reason=order.reason or _REASON)
        return await self._submit(event, {"mode": order.mode, "task": task}, 202)
