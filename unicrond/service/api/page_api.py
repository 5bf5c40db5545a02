"""The routes of the web page beside the log: its files, what it shows, goodput, accounts of what happened.

However many people look, the view of a state is computed once every VIEW_S at most, and in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from unicrond.core.rules.fault_targets import OrderRefused
from unicrond.display.alarms import alarm_line
from unicrond.events.vocabulary.phrases import guess
from unicrond.intake.config import Config
from unicrond.intake.tokens import Grant
from unicrond.page.files import page_routes
from unicrond.page.view import ranks_of, view
from unicrond.service.api.http_parts import answer, error, number_in
from unicrond.service.api.redaction import mask_of, redact
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.views.accounts import DEFAULT_LAST_S, KINDS, NoSuchSubject, Story
from unicrond.views.goodput_report import EMPTY_READING, reading, report

VIEW_S = 0.5


class PageApi:
    """The routes of the web page, over one coordinator. `health`: the body of /healthz. `caller`: the grant of the
    request that is being handled."""

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        health: Callable[[], dict[str, Any]],
        caller: Callable[[], Grant],
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._health = health
        self._caller = caller
        self._turn = asyncio.Lock()
        self._view_s = -VIEW_S
        self._view = b""

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the page's files, and of what it asks for."""
        return [
            *page_routes(),
            web.get("/v1/view", self.view),
            web.get("/v1/ranks/{task}", self.ranks),
            web.get("/v1/goodput", self.goodput),
            web.get("/v1/story", self.cluster_story),
            web.get("/v1/story/{kind}/{name}", self.story),
            web.get("/v1/views/{name}", self.value),
        ]

    async def view(self, _: web.Request) -> web.Response:
        """Answer with what the page shows, at most VIEW_S old; what the token may; how the coordinator is."""
        async with self._turn:
            if time.monotonic() - self._view_s > VIEW_S:
                self._view = await asyncio.to_thread(_encoded, self._coordinator)
                self._view_s = time.monotonic()
        body = {
            "may": sorted(self._caller().scopes),
            "inject": self._config.injection,
            "health": self._health(),
            "view": msgspec.Raw(self._view),
        }
        return answer(body)

    async def ranks(self, request: web.Request) -> web.Response:
        """Answer with a task's members in rank order."""
        name, caller = request.match_info["task"], self._caller()
        task = self._coordinator.state.tasks.get(name)
        if task is None or (caller.reads_own_alone and task.owner != caller.owner):
            raise OrderRefused(404, f"task: no task {name[:63]}")
        return answer(ranks_of(task, mask_of(self._coordinator.state).text))

    async def goodput(self, request: web.Request) -> web.Response:
        """Answer with the goodput up to the newest entry of the log; of the last `last_s` seconds, if that is given.
        503 where the books have failed."""
        state, goodput = self._coordinator.state, self._coordinator.views.goodput
        totals, last_s = goodput.totals, number_in(request, "last_s")
        if totals is None:
            return error(503, "goodput: the books have failed; the coordinator's log says why")
        peak_flops = (number_in(request, "peak_tflops") or 0) * 1e12
        since = goodput.since(state.now_us - last_s * 1_000_000) if last_s else EMPTY_READING
        body = report(reading(totals, state), state, since, peak_flops)
        return web.json_response(body)  # the standard library's JSON: integers of any size

    async def story(self, request: web.Request) -> web.Response:
        """Answer with the account of one subject; 404 where there is none of that name, 410 where it may be in the
        part of the log that came before this head's reading."""
        accounts, kind, name = self._coordinator.views.accounts, *map(request.match_info.get, ("kind", "name"))
        if kind not in KINDS:
            return error(404, f"kind: {str(kind)[:63]} is none of {', '.join(KINDS)}")
        caller = self._caller()
        if caller.reads_own_alone:  # of a task: access.py
            task = self._coordinator.state.tasks.get(str(name))
            if task is None or task.owner != caller.owner:
                return error(404, f"name: no task {str(name)[:63]}; see `unicronctl tasks`")
        try:
            return self._story_json(accounts.story(kind, str(name), is_own=caller.reads_own_alone))
        except NoSuchSubject as unknown:
            is_past = bool(accounts.after_seq) and kind in ("incident", "plan")
            return error(410 if is_past else 404, f"name: {unknown}"[:500])

    async def cluster_story(self, request: web.Request) -> web.Response:
        """Answer with the account of the cluster since `since_us`, or of the last `last_s` seconds."""
        since_us, last_s = number_in(request, "since_us"), number_in(request, "last_s")
        if since_us is None:
            span_us = (DEFAULT_LAST_S if last_s is None else last_s) * 1_000_000
            since_us = max(0, self._coordinator.state.now_us - span_us)
        health = self._health()
        alarms = [*filter(None, [health.get("trouble")]), *map(alarm_line, health.get("alarms", ()))]
        return self._story_json(self._coordinator.views.accounts.cluster_story(since_us, alarms))

    def _story_json(self, story: Story) -> web.Response:
        return answer(redact(msgspec.to_builtins(story), mask_of(self._coordinator.state).text))

    async def value(self, request: web.Request) -> web.Response:
        """Answer with the value of one of the head's views (views/table.py)."""
        name, views, state = request.match_info["name"], self._coordinator.views.by_name, self._coordinator.state
        if name not in views:
            return error(404, f"name: no view {name[:63]}; {guess(name, list(views))}")
        return web.json_response(redact(views[name].value(state), mask_of(state).text))


def _encoded(coordinator: Coordinator) -> bytes:
    state = coordinator.state
    return msgspec.json.encode(view(state, mask_of(state).text, coordinator.now_us()))
