"""A client of the Kubernetes API for one Node object: get, watch and patch, with a pod's own account.

Token and CA are files that the kubelet keeps fresh: both are read again, the token with each request. No other object
is requested.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
#: The server ends a watch by then, and it is requested again.
WATCH_S = 240
_ANSWER_S = 15.0
_LINE_BYTES_MAX = 4 * 1024 * 1024


T = TypeVar("T")


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


class _Status(msgspec.Struct):
    """The server's message about a failure."""

    message: str = ""
    code: int = 0


class KubernetesError(Exception):
    """The API server refused a request or did not answer; one line. `status`: of HTTP, 0: no answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class NodeApi:
    """The API for one Node object. `name`: of the object. `account`: the directory with `token` and `ca.crt`."""

    def __init__(self, url: str, name: str, account: Path) -> None:
        self._path = f"{url}/api/v1/nodes"
        self._name = name
        self._account = account
        self._session: aiohttp.ClientSession | None = None

    async def get(self) -> dict[str, Any]:
        """Return the object. Raise KubernetesError."""
        return await self._ask("GET", f"/{quote(self._name)}")

    async def patch(self, patch: Mapping[str, Any], kind: str, *, status: bool = False) -> dict[str, Any]:
        """Apply a patch to the object, or to its status, and return it. Raise KubernetesError."""
        path = f"/{quote(self._name)}{'/status' if status else ''}"
        return await self._ask("PATCH", path, data=json.dumps(patch).encode(), headers={"Content-Type": kind})

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
                self._path, params=query, headers=self._login(), timeout=timeout, ssl=self._tls()
            ) as answer:
                await _raise_for_status(answer)
                async for line in answer.content:
                    change = _decoded(line, _Change) if line.strip() else _Change()
                    if change.type == "ERROR":  # 410: the version is too old
                        failure = _decoded(change.object, _Status)
                        raise KubernetesError(_one_line(failure.message), failure.code)
                    if change.type in ("ADDED", "MODIFIED"):
                        yield _node(change.object)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise KubernetesError(_no_answer(error)) from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        headers = self._login() | more.pop("headers", {})
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with (await self._opened()).request(
                method, f"{self._path}{path}", headers=headers, timeout=timeout, ssl=self._tls(), **more
            ) as answer:
                await _raise_for_status(answer)
                body = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise KubernetesError(_no_answer(error)) from None
        return _node(body)

    async def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(read_bufsize=_LINE_BYTES_MAX)
        return self._session

    def _login(self) -> dict[str, str]:
        try:
            return {"Authorization": f"Bearer {(self._account / 'token').read_text().strip()}"}
        except OSError as error:
            raise KubernetesError(f"cannot read {self._account / 'token'}: {error.strerror}") from None

    def _tls(self) -> ssl.SSLContext | bool:
        if not self._path.startswith("https:"):
            return True
        try:
            return ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        except OSError as error:
            raise KubernetesError(f"cannot read {self._account / 'ca.crt'}: {error}") from None


async def _raise_for_status(answer: aiohttp.ClientResponse) -> None:
    if answer.status >= 400:
        try:
            detail = _decoded(await answer.read(), _Status).message
        except KubernetesError:
            detail = answer.reason or ""
        text = f"{answer.method} {answer.url.path}: {answer.status} {_one_line(detail)}"
        raise KubernetesError(text[:500], answer.status)


def _decoded(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KubernetesError(f"the API server's answer cannot be read: {_one_line(str(error))}"[:500]) from None


def _node(data: bytes | msgspec.Raw) -> dict[str, Any]:
    """Return the whole object; check the form of the parts that are read here. Raise KubernetesError."""
    _decoded(data, _Node)
    return _decoded(data, dict[str, Any])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _no_answer(error: BaseException) -> str:
    return f"the API server does not answer: {type(error).__name__}: {error}"[:500]
