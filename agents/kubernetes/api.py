"""A client of the Kubernetes API for one Node object, with a pod's own account: get, watch and patch, and Events about
it.

Token and CA are files that the kubelet keeps fresh: both are read again, the token with each request. No other object
is requested.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from unicrond.events.host import kubernetes_account as kubernetes
from unicrond.events.host.kubernetes_account import KubernetesError, decoded

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
#: The server ends a watch by then, and it is requested again.
WATCH_S = 240
_ANSWER_S = 15.0
_LINE_BYTES_MAX = 4 * 1024 * 1024


class _Metadata(msgspec.Struct):
    resourceVersion: str = ""  # noqa: N815  # Kubernetes' own name


class _Taint(msgspec.Struct):
    key: str
    effect: str = ""
    value: str = ""


class _Spec(msgspec.Struct):
    taints: list[_Taint] | None = None
    unschedulable: bool = False


class _Condition(msgspec.Struct):
    type: str
    status: str
    reason: str = ""


class _NodeStatus(msgspec.Struct):
    conditions: list[_Condition] | None = None


class _Node(msgspec.Struct):
    """The parts of a Node that node_object.py reads; the rest may have any form."""

    metadata: _Metadata | None = None
    spec: _Spec | None = None
    status: _NodeStatus | None = None


class _Change(msgspec.Struct):
    """One line of the answer to a watch."""

    type: str = ""
    object: msgspec.Raw = msgspec.Raw(b"{}")


class NodeApi:
    """The API for one Node object. `name`: of the object. `account`: the directory with `token` and `ca.crt`."""

    def __init__(self, url: str, name: str, account: Path) -> None:
        self._path = f"{url}/api/v1/nodes"
        #: Events about an object without a namespace lie there.
        self._events = f"{url}/api/v1/namespaces/default/events"
        self._name = name
        self._account = kubernetes.ServiceAccount(account)
        self._session: aiohttp.ClientSession | None = None

    async def get(self) -> dict[str, Any]:
        """Return the object. Raise KubernetesError."""
        return _node(await self._ask("GET", f"{self._path}/{quote(self._name)}"))

    async def patch(self, patch: Mapping[str, Any], kind: str, *, status: bool = False) -> dict[str, Any]:
        """Apply a patch to the object, or to its status, and return it. Raise KubernetesError."""
        path = f"{self._path}/{quote(self._name)}{'/status' if status else ''}"
        headers = {"Content-Type": kind}
        return _node(await self._ask("PATCH", path, data=json.dumps(patch).encode(), headers=headers))

    async def add_event(self, event: Mapping[str, Any]) -> None:
        """Create an Event about the object (node_object.py). Raise KubernetesError."""
        headers = {"Content-Type": "application/json"}
        await self._ask("POST", self._events, data=json.dumps(event).encode(), headers=headers)

    async def watch(self, version: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the object whenever it changes after `version`, until the server ends the watch. Raise
        KubernetesError."""
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={self._name}",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=WATCH_S + 60, sock_connect=_ANSWER_S)
        try:
            async with (await self._opened()).get(
                self._path, params=query, timeout=timeout, **self._identity()
            ) as answer:
                await kubernetes.raise_for_status(answer)
                async for line in answer.content:
                    change = decoded(line, _Change) if line.strip() else _Change()
                    if change.type == "ERROR":  # 410: the version is too old
                        failure = decoded(change.object, kubernetes.Status)
                        raise KubernetesError(kubernetes.one_line(failure.message), failure.code)
                    if change.type in ("ADDED", "MODIFIED"):
                        yield _node(change.object)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise kubernetes.no_answer(error) from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, url: str, **more: Any) -> bytes:
        identity = self._identity(more.pop("headers", {}))
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with (await self._opened()).request(method, url, timeout=timeout, **identity, **more) as answer:
                await kubernetes.raise_for_status(answer)
                return await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise kubernetes.no_answer(error) from None

    async def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(read_bufsize=_LINE_BYTES_MAX)
        return self._session

    def _identity(self, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return what each request brings: who asks, and whose certificate the server must have."""
        return {"headers": {**self._account.headers(), **(headers or {})}, "ssl": self._account.tls(self._path)}


def _node(data: bytes | msgspec.Raw) -> dict[str, Any]:
    """Return the whole object; check the form of the parts that are read here. Raise KubernetesError."""
    decoded(data, _Node)
    return decoded(data, dict[str, Any])
