"""A stand-in for the part of the Kubernetes API server that agents/kubernetes speaks: one real HTTP server.

It has Node objects: GET, watch with a field selector, merge patches with a resource version, and strategic merge
patches of conditions; and takes Events about them. What a real one does besides (admission, other lists, protobuf) it
does not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN = "of-this-pod"


class StandIn:
    """`node`: the object. `refuses`: a status for every answer, 0: none. `says`: the body of every answer, None: what
    is right."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refuses = 0
        self.says: bytes | None = None
        self.asked: list[tuple[str, str]] = []
        #: As `kubectl describe node` shows them: reason and type.
        self.events: list[tuple[str, str]] = []
        self.refuses_events = 0
        self.url = ""
        self._version = 10
        self._changed = asyncio.Event()
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        self.node: dict[str, Any] = {
            "metadata": {"name": name, "uid": f"of-{name}", "resourceVersion": "10"},
            "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]},
            "status": {"conditions": [ready]},
        }

    def change(self, **spec: Any) -> None:
        """As kubectl does; None takes a field away."""
        merged = {**self.node["spec"], **spec}
        self.node["spec"] = {name: value for name, value in merged.items() if value is not None}
        self._next()

    def ready(self, status: str) -> None:
        """The kubelet says so, or is silent ("Unknown")."""
        self.node["status"]["conditions"][0] |= {"status": status, "reason": "KubeletNotReady"}
        self._next()

    def condition(self, kind: str) -> dict[str, Any] | None:
        """Of the object."""
        return next((one for one in self.node["status"]["conditions"] if one["type"] == kind), None)

    @property
    def taints(self) -> list[str]:
        """Their keys."""
        return [taint["key"] for taint in self.node["spec"].get("taints") or []]

    def _next(self) -> None:
        self._version += 1
        self.node["metadata"]["resourceVersion"] = str(self._version)
        self._changed.set()
        self._changed = asyncio.Event()

    # --- what is asked ---------------------------------------------------------------------------

    async def _get(self, request: web.Request) -> web.Response:
        return self._wrong(request) or web.json_response(self.node)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if wrong := self._wrong(request):
            return wrong
        if request.query.get("fieldSelector") != f"metadata.name={self.name}" or "watch" not in request.query:
            return _status(403, "nodes is forbidden: only this pod's own")
        answer = web.StreamResponse()
        await answer.prepare(request)
        told = request.query["resourceVersion"]
        while not self.refuses:
            changed = self._changed
            if told != str(self._version):
                told = str(self._version)
                await answer.write(json.dumps({"type": "MODIFIED", "object": self.node}).encode() + b"\n")
            await changed.wait()
        return answer

    async def _patch(self, request: web.Request) -> web.Response:
        if wrong := self._wrong(request):
            return wrong
        patch = await request.json()
        if request.content_type != "application/merge-patch+json":
            return _status(415, "not here")
        version = patch["metadata"]["resourceVersion"]
        if version != self.node["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified; please apply your changes to the latest version")
        self.change(**patch["spec"])
        return web.json_response(self.node)

    async def _patch_status(self, request: web.Request) -> web.Response:
        if wrong := self._wrong(request):
            return wrong
        if request.content_type != "application/strategic-merge-patch+json":
            return _status(415, "not here")
        for one in (await request.json())["status"]["conditions"]:
            conditions = [old for old in self.node["status"]["conditions"] if old["type"] != one["type"]]
            self.node["status"]["conditions"] = [*conditions, one]
        self._next()
        return web.json_response(self.node)

    async def _add_event(self, request: web.Request) -> web.Response:
        if wrong := self._wrong(request):
            return wrong
        if self.refuses_events:
            return _status(self.refuses_events, "events is forbidden")
        event = await request.json()
        assert event["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": self.name, "uid": "of-gpu07"}
        assert event["metadata"] == {"generateName": f"{self.name}.", "namespace": "default"}
        self.events.append((event["reason"], event["type"]))
        return web.json_response(event, status=201)

    def _wrong(self, request: web.Request) -> web.Response | None:
        self.asked.append((request.method, request.path))
        if self.refuses:
            return _status(self.refuses, "not now")
        if self.says is not None:
            return web.Response(body=self.says, content_type="application/json")
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        name = request.match_info.get("name", self.name)
        return None if name == self.name else _status(403, f'nodes "{name}" is forbidden')

    def application(self) -> web.Application:
        """Its routes."""
        made = web.Application()
        made.add_routes(
            [
                web.get("/api/v1/nodes", self._watch),
                web.get("/api/v1/nodes/{name}", self._get),
                web.patch("/api/v1/nodes/{name}", self._patch),
                web.patch("/api/v1/nodes/{name}/status", self._patch_status),
                web.post("/api/v1/namespaces/default/events", self._add_event),
            ]
        )
        return made


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


def account(directory: Path) -> Path:
    """A service account's files."""
    (directory / "token").write_text(f"{TOKEN}\n")
    return directory


@asynccontextmanager
async def stand_in(name: str) -> AsyncIterator[StandIn]:
    """It answers at `url`."""
    made = StandIn(name)
    runner = web.AppRunner(made.application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    made.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield made
    finally:
        await runner.cleanup()
