"""A stand-in for the part of the Kubernetes API server that reviews tokens: one real HTTP server with pods' tokens.

A real one was asked too, with tokens of bound pods: it answers alike (docs/operate/kubernetes.md).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

HEAD_TOKEN = "of-the-head"
AGENT = "system:serviceaccount:training:unicron-agent"
POD_TOKEN = "of-the-pod"


def extra(pod: str = "unicron-agent-x7f2k", machine: str = "gpu1.example") -> dict[str, list[str]]:
    return {
        "authentication.kubernetes.io/pod-name": [pod],
        "authentication.kubernetes.io/node-name": [machine],
        "authentication.kubernetes.io/credential-id": ["JTI=1"],
    }


def review(**changes: Any) -> dict[str, Any]:
    """What it says of the pod's token, with changes."""
    status = {
        "authenticated": True,
        "user": {"username": AGENT, "uid": "u", "groups": ["system:serviceaccounts"], "extra": extra()},
        "audiences": ["unicrond"],
    }
    return status | changes


class TokenReviews:
    """`answers`: what it says of each token. `refuses`: a status for every answer, 0: none. `arrivals`: the paths of
    requests."""

    def __init__(self) -> None:
        self.url = ""
        self.refuses = 0
        self.reviews = 0
        self.arrivals: asyncio.Queue[str] = asyncio.Queue()
        self.answers: dict[str, dict[str, Any]] = {POD_TOKEN: review()}

    async def _review(self, request: web.Request) -> web.Response:
        self.reviews += 1
        self.arrivals.put_nowait(request.path)
        if self.refuses or request.headers.get("Authorization") != f"Bearer {HEAD_TOKEN}":
            code = self.refuses or 401
            return web.json_response({"kind": "Status", "code": code, "message": "not you"}, status=code)
        asked = await request.json()
        assert (asked["kind"], asked["spec"]["audiences"]) == ("TokenReview", ["unicrond"])
        status = self.answers.get(asked["spec"]["token"], {"error": "[invalid bearer token]", "user": {}})
        return web.json_response(asked | {"status": status}, status=201)

    @asynccontextmanager
    async def serve(self, host: str = "127.0.0.1") -> AsyncIterator[TokenReviews]:
        """Answer at `url`."""
        application = web.Application()
        application.add_routes([web.post("/apis/authentication.k8s.io/v1/tokenreviews", self._review)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, host, 0).start()
        self.url = f"http://{host}:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


class TokenReviewThread:
    """Token reviews by a thread of their own, for tests that wait for pods which ask for them."""

    def __init__(self, host: str) -> None:
        self.reviews = TokenReviews()
        self._host = host
        self._is_up, self._is_over = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._is_up.wait(10)

    async def _serve(self) -> None:
        async with self.reviews.serve(self._host):
            self._is_up.set()
            await self._is_over.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()
        self._loop.close()


def account_of_head(directory: Path) -> Path:
    """Make the files of the head's service account."""
    directory.mkdir()
    (directory / "token").write_text(f"{HEAD_TOKEN}\n")
    (directory / "namespace").write_text("training")
    return directory
