"""Whose pod a token is of, as Kubernetes' API server says (TokenReview of authentication.k8s.io/v1).

Rules
-----
* A token counts if the API server has authenticated it for the configured audience, as the configured service account,
  and names its pod and its machine (Kubernetes 1.32 and newer). An API server that knows no audiences names none.
* The pod decides which node it is, never the request: a stolen token makes nobody another node.
* The head's own token and the API server's CA are files that the kubelet keeps fresh; they are read for each review.
* REVIEWS_MAX are under way at a time; an answer takes ANSWER_S at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from unicrond.events.host import kubernetes_account as kubernetes
from unicrond.intake.pod_logins import NodeOfPod, PodLogins

REVIEWS_MAX = 4
ANSWER_S = 10.0
_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_MACHINE = "authentication.kubernetes.io/node-name"
_TOKEN_BYTES_MAX = 16_384


class PodRefused(Exception):
    """The token is not one of a pod that gets a login; one line. `status`: of HTTP."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Pod(NamedTuple):
    """A pod whose token was reviewed, and the machine that it is on."""

    name: str
    machine: str

    def node(self, kind: NodeOfPod) -> str:
        """Return the name of the node that this pod is."""
        name = {"machine": self.machine, "pod": self.name, "index": self.name.rpartition("-")[0]}[kind]
        return name.replace(".", "-")


class _User(msgspec.Struct, frozen=True):
    username: str = ""
    extra: Mapping[str, list[str]] = {}


class _ReviewStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: _User = _User()
    audiences: list[str] | None = None
    error: str = ""


class _Review(msgspec.Struct, frozen=True):
    """The parts of a TokenReview that are read here."""

    status: _ReviewStatus = _ReviewStatus()


class PodTokens:
    """Asks the API server about tokens of pods."""

    def __init__(self, settings: PodLogins) -> None:
        self._settings = settings
        self._account = kubernetes.ServiceAccount(Path(settings.account_dir))
        self._reviews = asyncio.Semaphore(REVIEWS_MAX)

    async def pod_of(self, token: str) -> Pod:
        """Return the pod that the token was made for. Raise PodRefused."""
        if not token or len(token) > _TOKEN_BYTES_MAX:
            raise PodRefused("token: missing or too long; send the pod's projected token", 401)
        try:
            async with self._reviews:
                status = await self._review(token)
            expected = self._username()
        except kubernetes.KubernetesError as error:
            raise PodRefused(str(error), 503) from None
        audience, user = self._settings.audience, status.user
        if not status.authenticated or audience not in (status.audiences or ()):
            detail = kubernetes.one_line(status.error)[:200] or f"it is not for audience {audience}"
            raise PodRefused(f"token: Kubernetes does not take it: {detail}", 401)
        if user.username != expected:
            raise PodRefused(f"token: of {user.username[:300]}; pods of {expected} alone get logins", 403)
        name, machine = (next(iter(user.extra.get(key, ())), "") for key in (_POD_NAME, _MACHINE))
        if not (name and machine):
            raise PodRefused(
                "token: names no pod or no machine; give a pod's projected one, of Kubernetes 1.32 or newer", 403
            )
        return Pod(name, machine)

    def _username(self) -> str:
        """Return Kubernetes' name of the service account. Raise KubernetesError."""
        namespace, _, name = self._settings.service_account.rpartition(":")
        return f"system:serviceaccount:{namespace or self._account.namespace}:{name}"

    async def _review(self, token: str) -> _ReviewStatus:
        url = self._settings.url or kubernetes.in_cluster_url()
        if not url:
            raise kubernetes.KubernetesError("pod_logins.url: this head is no pod; give the API server's address")
        spec = {"token": token, "audiences": [self._settings.audience]}
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        headers = {**self._account.headers(), "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        body, tls = msgspec.json.encode(review), self._account.tls(url)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{url}{_PATH}", data=body, headers=headers, ssl=tls) as answer,
            ):
                await kubernetes.raise_for_status(answer)
                return kubernetes.decoded(await answer.read(), _Review).status
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise kubernetes.no_answer(error) from None
