"""`unicron-replay serve`: the web page over a log that is only read, at any moment (`at_us`), on loopback."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from typing import Any

import msgspec
from aiohttp import web

from unicrond.core.planning.problem import ProblemError
from unicrond.display.event_lines import entry_json
from unicrond.events.cli.command_line import UsageError
from unicrond.intake.config import is_loopback
from unicrond.page.files import page_routes
from unicrond.page.view import ranks_of, view
from unicrond.replay.reading.opening import as_json, open_source, say
from unicrond.replay.reading.progress import show
from unicrond.replay.views.moments import Moment, Moments
from unicrond.service.api.http_parts import is_from_elsewhere
from unicrond.service.api.redaction import Discretion
from unicrond.views.accounts import DEFAULT_LAST_S, KINDS, Accounts, NoSuchSubject
from unicrond.views.goodput_report import EMPTY_READING, reading, report
from unicrond.views.view import feed_all
from unicrond.views.what_if import WhatIfError, answer, changes_of, what_if

#: Entries that go out together.
_BATCH = 200


class PageServer:
    """Answers the page from a log that was read. `name`: what the log is called on the page."""

    def __init__(self, moments: Moments, name: str) -> None:
        self._moments = moments
        self._name = name
        self._redactor = Discretion()
        self._accounts, self._turn = Accounts(lines_max=0), asyncio.Lock()
        for entry in moments.entries:
            self._redactor.see(entry)

    def application(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(middlewares=[_guard], client_max_size=64 * 1024)
        app.add_routes(
            [
                *page_routes(),
                web.get("/v1/view", self.view),
                web.get("/v1/events", self.events),
                web.get("/v1/goodput", self.goodput),
                web.get("/v1/ranks/{task}", self.ranks),
                web.get("/v1/story", self.cluster_story),
                web.get("/v1/story/{kind}/{name}", self.story),
                web.post("/v1/plan/whatif", self.whatif),
            ]
        )
        return app

    async def view(self, request: web.Request) -> web.Response:
        """Return what the page shows at the moment."""
        moment = self._at(request)
        first_us, last_us = self._moments.span_us
        body = {
            "may": ["read"],
            "inject": False,
            "health": {"status": "replay", "alarms": [], "trouble": ""},
            "replay": {
                "name": self._name,
                "from_us": first_us,
                "until_us": last_us,
                "last_seq": len(self._moments.entries),
            },
            "view": view(moment.state, self._redactor.text),
        }
        return _json(body)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events, as the coordinator does, and end with the log's last one."""
        after, until = (_number(request, name) for name in ("after", "until"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        entries = [item for item in self._moments.entries if item.seq > after and (not until or item.seq <= until)]
        for first in range(0, len(entries), _BATCH):
            documents = [self._redactor.plain(entry_json(entry)) for entry in entries[first : first + _BATCH]]
            lines = []
            for document in documents:
                kind = document["envelope"]["event"]["type"] if "envelope" in document else "QuarantinedMessage"
                lines.append(
                    f"id: {document['seq']}\nevent: {kind}\ndata: {msgspec.json.encode(document).decode()}\n\n"
                )
            await response.write("".join(lines).encode())
        return response

    async def goodput(self, request: web.Request) -> web.Response:
        """Report the goodput from the log's beginning to the moment, or of the last `last_s` seconds before it."""
        moment = self._at(request)
        now, last_s, peak = (
            reading(moment.totals, moment.state),
            _number(request, "last_s"),
            _number(request, "peak_tflops"),
        )
        first = self._moments.at_us(moment.state.now_us - last_s * 1_000_000) if last_s else None
        since = reading(first.totals, first.state) if first else EMPTY_READING
        return web.json_response(report(now, moment.state, since, peak * 1e12))

    async def ranks(self, request: web.Request) -> web.Response:
        """Return a task's members in rank order; 404 where there is no such task yet."""
        task = self._at(request).state.tasks.get(request.match_info["task"])
        return (
            _json(ranks_of(task, self._redactor.text)) if task else _json({"error": "the task was not there yet"}, 404)
        )

    async def story(self, request: web.Request) -> web.Response:
        """Return the account of one subject at the moment; 404 where there was none of that name yet."""
        kind, name = (request.match_info[field] for field in ("kind", "name"))
        accounts = await self._accounts_at(request)
        if kind not in KINDS:
            return _json({"error": f"kind: none of {', '.join(KINDS)}"}, 404)
        try:
            return _json(self._redactor.plain(accounts.story(kind, name)))
        except NoSuchSubject as unknown:
            return _json({"error": self._redactor.text(str(unknown))}, 404)

    async def cluster_story(self, request: web.Request) -> web.Response:
        """Return the account of the cluster at the moment, of the last `last_s` seconds before it."""
        accounts = await self._accounts_at(request)
        last_us = (_number(request, "last_s") or DEFAULT_LAST_S) * 1_000_000
        return _json(self._redactor.plain(accounts.cluster_story(max(0, accounts.state.now_us - last_us))))

    async def _accounts_at(self, request: web.Request) -> Accounts:
        """Return the accounts at the moment: read on from those of the last request, or from the beginning."""
        seq = self._at(request).state.seq
        async with self._turn:
            if self._accounts.state.seq > seq:
                self._accounts = Accounts(lines_max=0)
            accounts = self._accounts
            await asyncio.to_thread(feed_all, accounts, self._moments.entries[accounts.state.seq : seq], accounts.state)
            return accounts

    async def whatif(self, request: web.Request) -> web.Response:
        """Return the plan that would have been adopted then, were the cluster as the body says; 400 for a change that
        is not possible."""
        moment = self._at(request)
        try:
            changes = changes_of(msgspec.json.decode(await request.read() or b"{}"))
            outcome = await asyncio.to_thread(what_if, moment.state, moment.policy, changes)
        except (msgspec.MsgspecError, WhatIfError, ProblemError) as error:
            return _json({"error": str(error)}, 400)
        return _json(answer(moment.state, outcome))

    def _at(self, request: web.Request) -> Moment:
        return self._moments.at_us(_number(request, "at_us") or None)


@web.middleware
async def _guard(request: web.Request, handler: Any) -> web.StreamResponse:
    """Refuse requests that a web page in somebody's browser may have made: such a page can reach loopback, but cannot
    name us as its Host."""
    host = request.host.rsplit(":", 1)[0].strip("[]")
    if not is_loopback(host):
        return _json({"error": f"host: {host} is not loopback; call 127.0.0.1"}, 403)
    if request.method != "GET" and is_from_elsewhere(request):
        return _json({"error": "origin: web pages of others may not ask a log"}, 403)
    response: web.StreamResponse = await handler(request)
    return response


def _number(request: web.Request, field: str) -> int:
    """Return a number of the query; 0 where there is none."""
    text = request.query.get(field, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def serve_command(options: argparse.Namespace) -> int:
    """Serve the page until interrupted. Loopback only: a log holds tasks' arguments and environments."""
    moments = Moments()
    async with open_source(options) as source:
        await show(source, moments, "reading")
    if not moments.entries:
        raise UsageError("the log is empty: there is nothing to show")
    gc.freeze()  # what was read stays; what requests leave behind is collected again
    gc.enable()
    name = str(options.log or options.state_dir or options.url or ", ".join(options.nats))
    runner = web.AppRunner(PageServer(moments, name).application(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", options.port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(f"--port: {options.port}: {error.strerror}; give another") from None
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        say(as_json({"url": url}) if options.json else f"{len(moments.entries)} entries at {url} (Ctrl-C ends it)")
        sys.stdout.flush()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
    return 0
