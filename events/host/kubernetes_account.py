"""A pod's own account at the API server of Kubernetes: where that is, and files that the kubelet keeps fresh.

They are read again for each request. What is requested lives with whoever requests it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    import aiohttp

#: Where the kubelet puts the files, unless a pod says otherwise.
ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")

#: Where the head's API takes a pod's token, and enrolls the pod's node.
POD_LOGINS = "/v1/pod-logins"

T = TypeVar("T")


class KubernetesError(Exception):
    """The API server refused a request or did not answer; one line. `status`: of HTTP, 0: no answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Status(msgspec.Struct):
    """The server's message about a failure."""

    message: str = ""
    code: int = 0


class ServiceAccount:
    """The account whose `token`, `ca.crt` and `namespace` are in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def namespace(self) -> str:
        """Read the account's namespace. Raise KubernetesError."""
        return self._read("namespace")

    def headers(self) -> dict[str, str]:
        """Return the headers of a request in the account's name. Raise KubernetesError."""
        return {"Authorization": f"Bearer {self._read('token')}"}

    def tls(self, url: str) -> ssl.SSLContext | bool:
        """Return what aiohttp's `ssl` takes for a request to this address. Raise KubernetesError."""
        if not url.startswith("https:"):
            return True
        path = self._directory / "ca.crt"
        try:
            return ssl.create_default_context(cafile=str(path))
        except OSError as error:
            raise KubernetesError(f"cannot read {path}: {error}") from None

    def _read(self, name: str) -> str:
        path = self._directory / name
        try:
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise KubernetesError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def in_cluster_url(environ: Mapping[str, str] = os.environ) -> str:
    """Return the URL of the API server for pods; "" outside of a cluster."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}" if host else ""


async def raise_for_status(answer: aiohttp.ClientResponse) -> None:
    """Raise KubernetesError where the API server refuses, with its message."""
    if answer.status >= 400:
        try:
            detail = decoded(await answer.read(), Status).message
        except KubernetesError:
            detail = answer.reason or ""
        text = f"{answer.method} {answer.url.path}: {answer.status} {one_line(detail)}"
        raise KubernetesError(text[:500], answer.status)


def decoded(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode a part of an answer. Raise KubernetesError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KubernetesError(f"the API server's answer cannot be read: {one_line(str(error))}"[:500]) from None


def one_line(text: str) -> str:
    """Return the text with single spaces between its words."""
    return " ".join(text.split())


def no_answer(error: BaseException) -> KubernetesError:
    """Return the error of a request that got no answer."""
    return KubernetesError(f"the API server does not answer: {type(error).__name__}: {error}"[:500])
